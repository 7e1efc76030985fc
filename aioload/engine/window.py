"""Window: how far ahead of the consumer the engine may work, in batches and in bytes. Pure decisions."""


def max_batches(*, prefetch_factor: int, num_workers: int, batch_size: int, num_concurrent: int) -> int:
    """Return how many batches may be under way or waiting for the consumer.

    It is torch's ``prefetch_factor * num_workers``, or more when batches are so small that fewer than
    ``num_concurrent`` samples would be in flight: reads in flight do not depend on the batch size.

    Args:
        prefetch_factor: Batches ahead per decode thread.
        num_workers: Decode threads.
        batch_size: Samples of a usual batch, 1 if unknown.
        num_concurrent: Reads (or awaited samples) that should be in flight; 0 where reads are not separate.
    """
    enough_to_read = -(-num_concurrent // max(1, batch_size))
    return max(1, prefetch_factor * num_workers, enough_to_read)


def batches_ahead(*, max_batches: int, batch_bytes: int, max_bytes: int) -> int:
    """Return how many batches may be ahead of the consumer, given their size.

    At least one: the batch that the consumer needs next is always allowed, however large, so nothing can wait
    for ever.

    Args:
        max_batches: Bound on batches ahead.
        batch_bytes: Bytes of the largest batch so far, 0 while unknown.
        max_bytes: Bound on the bytes of all batches ahead.
    """
    if batch_bytes <= 0:
        return max(1, max_batches)
    return max(1, min(max_batches, max_bytes // batch_bytes))
