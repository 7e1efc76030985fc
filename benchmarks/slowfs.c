/* A slow file system: a local folder, read-only, each operation of which takes as long as one is told.
 *
 * Usage: slowfs SOURCE MOUNTPOINT [NAME=VALUE ...]
 *
 * It prints "mounted" when MOUNTPOINT may be used (a mount point that was not there is made, and removed at the
 * end), and runs until it is unmounted, or gets SIGTERM, SIGINT or SIGHUP. The settings:
 *
 *   lookup_ms getattr_ms open_ms read_ms release_ms
 *                     how long such an operation takes at least (0); a read past the end takes no time
 *   slow_files        share of files whose operations all take slow_factor times as long (0)
 *   slow_opens        share of opens that take slow_factor times as long, and so do the reads of what was opened (0)
 *   slow_factor       (100)
 *   fail_opens        share of opens that fail with EIO; the next open of the same file does not (0)
 *   seed              of the three shares (0). What happens to the n-th open of a file follows from the seed, the
 *                     file's path below SOURCE and n, and from nothing else
 *   max_concurrent    most operations that are being delayed at one time, others wait for them; 0 for any number (0)
 *   cache_s           how long the kernel may answer lookups and getattrs of a file itself (0)
 *   page_cache        1: the kernel keeps a file's pages while it is open, which shared mappings need (0)
 *   until_eof         1: ends at the end of standard input. Until then a line "NAME=VALUE" changes a setting, and is
 *                     answered by a line "ok" (0)
 *
 * Each open of a file is an operation of its own, whatever the kernel keeps, and so is each read, unless page_cache
 * is set. Directories are looked up once. Reading MOUNTPOINT/.slowfs gives
 * the number of operations so far, a line each, this file's own left out:
 *
 *   lookup getattr open read release
 *   slow              opens that were slow, by slow_opens or slow_files
 *   failed            opens that failed by fail_opens
 *   peak              most operations that were under way at one time
 *
 * Any number of operations are under way at once: the thread that takes a request prepares the answer, and one thread
 * for all sends each answer when it is due. (A sleeping thread for each operation costs twice the CPU time.)
 */

#define FUSE_USE_VERSION 312
#define _GNU_SOURCE

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_BACKGROUND 4096
#define NUM_BUCKETS 65536
#define DIRECTORY_TIMEOUT_S 3600.0
#define COUNTS_NAME ".slowfs"
#define COUNTS_INO 2
#define COUNTS_BYTES 512

enum setting {
    LOOKUP_MS, GETATTR_MS, OPEN_MS, READ_MS, RELEASE_MS,
    SLOW_FILES, SLOW_OPENS, SLOW_FACTOR, FAIL_OPENS, SEED, MAX_CONCURRENT, CACHE_S, PAGE_CACHE, UNTIL_EOF,
    NUM_SETTINGS
};

static const char *const setting_names[NUM_SETTINGS] = {
    "lookup_ms", "getattr_ms", "open_ms", "read_ms", "release_ms",
    "slow_files", "slow_opens", "slow_factor", "fail_opens", "seed", "max_concurrent", "cache_s", "page_cache",
    "until_eof",
};

static _Atomic double settings[NUM_SETTINGS] = {[SLOW_FACTOR] = 100.0};

/* The first five count the operations of the first five settings. */
enum count { SLOW = RELEASE_MS + 1, FAILED, NUM_COUNTS };

static const char *const count_names[NUM_COUNTS] = {"lookup", "getattr", "open", "read", "release", "slow", "failed"};
static atomic_ullong counts[NUM_COUNTS];

/* A file or directory that was looked up once. It is never freed: the kernel's inode number is its address. */
struct node {
    struct node *next;
    uint64_t hash;
    atomic_uint num_opens;
    atomic_bool just_failed;
    char path[]; /* below SOURCE; "." is SOURCE */
};

static struct node *buckets[NUM_BUCKETS];
static struct node *root;
static pthread_mutex_t nodes_lock = PTHREAD_MUTEX_INITIALIZER;

/* What an open file or directory is to us: its number is the handle's address. */
struct handle {
    int fd;
    bool slow;
    DIR *directory;
    size_t text_bytes;
    char text[];
};

static int source_fd;
static const char *mountpoint;
static bool mountpoint_is_ours;
static struct fuse_session *session;

/* ---- chance: pure functions of seed, path and number ---- */

static uint64_t mixed(uint64_t value)
{
    value += 0x9e3779b97f4a7c15u;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

static uint64_t path_hash(const char *path)
{
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    for (; *path; path++)
        hash = (hash ^ (unsigned char)*path) * 0x100000001b3u;
    return mixed(hash);
}

static bool happens(enum setting share, const struct node *node, unsigned number)
{
    if (settings[share] <= 0)
        return false;
    uint64_t seed = mixed((uint64_t)settings[SEED] * NUM_SETTINGS + share);
    return (double)(mixed(mixed(seed ^ node->hash) + number) >> 11) * 0x1p-53 < settings[share];
}

/* ---- handles ---- */

static struct handle *new_handle(size_t text_bytes)
{
    struct handle *handle = calloc(1, sizeof *handle + text_bytes);
    if (handle)
        handle->fd = -1;
    return handle;
}

static void free_handle(struct handle *handle)
{
    if (handle->directory)
        closedir(handle->directory);
    else if (handle->fd >= 0)
        close(handle->fd);
    free(handle);
}

/* ---- answers, each sent when it is due ---- */

enum kind { ANSWER_ERROR, ANSWER_ENTRY, ANSWER_ATTR, ANSWER_OPEN, ANSWER_DATA };

struct answer {
    struct answer *next; /* of those that wait for a turn */
    uint64_t due_ns;
    uint64_t delay_ns;
    fuse_req_t request;
    enum kind kind;
    int error;
    union {
        struct fuse_entry_param entry;
        struct {
            struct stat status;
            double timeout_s;
        } attr;
        struct fuse_file_info open;
        size_t num_bytes;
    };
    char data[];
};

static pthread_mutex_t answers_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t first_changed; /* of the monotonic clock */
static struct answer **heap;         /* the first due first */
static size_t heap_size, heap_room;
static struct answer *first_waiting, **last_waiting = &first_waiting;
static int num_under_way, peak;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Return an answer to fill in, or answer ENOMEM and return NULL. */
static struct answer *new_answer(fuse_req_t request, enum kind kind, size_t num_bytes)
{
    struct answer *answer = malloc(sizeof *answer + num_bytes);
    if (!answer) {
        fuse_reply_err(request, ENOMEM);
        return NULL;
    }
    memset(answer, 0, sizeof *answer);
    answer->request = request;
    answer->kind = kind;
    pthread_mutex_lock(&answers_lock);
    if (++num_under_way > peak)
        peak = num_under_way;
    pthread_mutex_unlock(&answers_lock);
    return answer;
}

static void send_answer(struct answer *answer)
{
    pthread_mutex_lock(&answers_lock);
    num_under_way--;
    pthread_mutex_unlock(&answers_lock);
    if (answer->error || answer->kind == ANSWER_ERROR)
        fuse_reply_err(answer->request, answer->error);
    else if (answer->kind == ANSWER_ENTRY)
        fuse_reply_entry(answer->request, &answer->entry);
    else if (answer->kind == ANSWER_ATTR)
        fuse_reply_attr(answer->request, &answer->attr.status, answer->attr.timeout_s);
    else if (answer->kind == ANSWER_DATA)
        fuse_reply_buf(answer->request, answer->data, answer->num_bytes);
    else if (fuse_reply_open(answer->request, &answer->open) == -ENOENT)
        free_handle((struct handle *)(uintptr_t)answer->open.fh); /* the caller is gone: nobody will release it */
    free(answer);
}

static void push(struct answer *answer)
{
    if (heap_size == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 1024;
        heap = realloc(heap, heap_room * sizeof *heap);
        if (!heap)
            abort();
    }
    size_t place = heap_size++;
    for (; place > 0 && heap[(place - 1) / 2]->due_ns > answer->due_ns; place = (place - 1) / 2)
        heap[place] = heap[(place - 1) / 2];
    heap[place] = answer;
    if (place == 0)
        pthread_cond_signal(&first_changed);
}

static struct answer *pop(void)
{
    struct answer *first = heap[0], *last = heap[--heap_size];
    size_t place = 0, child;
    while ((child = 2 * place + 1) < heap_size) {
        if (child + 1 < heap_size && heap[child + 1]->due_ns < heap[child]->due_ns)
            child++;
        if (heap[child]->due_ns >= last->due_ns)
            break;
        heap[place] = heap[child];
        place = child;
    }
    heap[place] = last;
    return first;
}

/* Let the time run for those who have waited longest, as far as max_concurrent lets them. */
static void admit(void)
{
    double most = settings[MAX_CONCURRENT];
    while (first_waiting && (most <= 0 || (double)heap_size < most)) {
        struct answer *answer = first_waiting;
        if (!(first_waiting = answer->next))
            last_waiting = &first_waiting;
        answer->due_ns = now_ns() + answer->delay_ns;
        push(answer);
    }
}

/* Count the operation, and send its answer when it has taken its time. The answer is no longer the caller's. */
static void answer_in_time(struct answer *answer, enum setting operation, bool slow)
{
    counts[operation]++;
    answer->delay_ns = (uint64_t)(settings[operation] * (slow ? settings[SLOW_FACTOR] : 1.0) * 1e6);
    if (answer->delay_ns == 0) {
        send_answer(answer);
        return;
    }
    pthread_mutex_lock(&answers_lock);
    *last_waiting = answer;
    last_waiting = &answer->next;
    admit();
    pthread_mutex_unlock(&answers_lock);
}

static void *send_when_due(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&answers_lock);
    for (;;) {
        if (heap_size == 0) {
            pthread_cond_wait(&first_changed, &answers_lock);
        } else if (heap[0]->due_ns <= now_ns()) {
            struct answer *answer = pop();
            admit();
            pthread_mutex_unlock(&answers_lock);
            send_answer(answer);
            pthread_mutex_lock(&answers_lock);
        } else {
            uint64_t due_ns = heap[0]->due_ns;
            struct timespec due = {.tv_sec = (time_t)(due_ns / 1000000000u), .tv_nsec = (long)(due_ns % 1000000000u)};
            pthread_cond_timedwait(&first_changed, &answers_lock, &due);
        }
    }
    return NULL;
}

/* ---- nodes ---- */

static struct node *node_of(fuse_ino_t ino)
{
    return ino == FUSE_ROOT_ID ? root : (struct node *)(uintptr_t)ino;
}

/* Return the one node of a path, NULL when there is no memory for it. */
static struct node *node_at(const char *path)
{
    uint64_t hash = path_hash(path);
    struct node **bucket = &buckets[hash % NUM_BUCKETS];
    pthread_mutex_lock(&nodes_lock);
    struct node *node = *bucket;
    while (node && strcmp(node->path, path) != 0)
        node = node->next;
    if (!node && (node = calloc(1, sizeof *node + strlen(path) + 1))) {
        strcpy(node->path, path);
        node->hash = hash;
        node->next = *bucket;
        *bucket = node;
    }
    pthread_mutex_unlock(&nodes_lock);
    return node;
}

static const struct stat counts_status = {.st_ino = COUNTS_INO, .st_mode = S_IFREG | 0444, .st_nlink = 1};

static double timeout_s(const struct stat *status)
{
    return S_ISDIR(status->st_mode) ? DIRECTORY_TIMEOUT_S : settings[CACHE_S];
}

/* ---- operations ---- */

static void on_init(void *unused, struct fuse_conn_info *connection)
{
    (void)unused;
    connection->max_background = MAX_BACKGROUND; /* releases and readahead; the default is 12 */
    connection->congestion_threshold = MAX_BACKGROUND;
}

/* Write the path of a name in a folder, and return whether there was room for it. */
static bool join(char *path, size_t room, fuse_ino_t parent, const char *name)
{
    if (parent == FUSE_ROOT_ID)
        return (size_t)snprintf(path, room, "%s", name) < room;
    return (size_t)snprintf(path, room, "%s/%s", node_of(parent)->path, name) < room;
}

static void on_lookup(fuse_req_t request, fuse_ino_t parent, const char *name)
{
    if (parent == FUSE_ROOT_ID && strcmp(name, COUNTS_NAME) == 0) {
        struct fuse_entry_param entry = {.ino = COUNTS_INO, .attr = counts_status};
        fuse_reply_entry(request, &entry);
        return;
    }
    char path[4096];
    struct node *node = join(path, sizeof path, parent, name) ? node_at(path) : NULL;
    struct answer *answer = node ? new_answer(request, ANSWER_ENTRY, 0) : NULL;
    if (!node)
        fuse_reply_err(request, ENAMETOOLONG);
    if (!answer)
        return;
    if (fstatat(source_fd, path, &answer->entry.attr, 0) != 0)
        answer->error = errno;
    answer->entry.ino = (uintptr_t)node;
    answer->entry.attr_timeout = answer->entry.entry_timeout = timeout_s(&answer->entry.attr);
    answer_in_time(answer, LOOKUP_MS, happens(SLOW_FILES, node, 0));
}

static void on_getattr(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *info)
{
    (void)info;
    if (ino == COUNTS_INO) {
        fuse_reply_attr(request, &counts_status, 0);
        return;
    }
    struct answer *answer = new_answer(request, ANSWER_ATTR, 0);
    if (!answer)
        return;
    if (fstatat(source_fd, node_of(ino)->path, &answer->attr.status, 0) != 0)
        answer->error = errno;
    answer->attr.timeout_s = timeout_s(&answer->attr.status);
    answer_in_time(answer, GETATTR_MS, happens(SLOW_FILES, node_of(ino), 0));
}

static struct handle *counts_handle(void)
{
    struct handle *handle = new_handle(COUNTS_BYTES);
    if (!handle)
        return NULL;
    int bytes = 0;
    for (int number = 0; number < NUM_COUNTS; number++)
        bytes += snprintf(handle->text + bytes, COUNTS_BYTES - bytes, "%s %llu\n", count_names[number],
                          (unsigned long long)counts[number]);
    pthread_mutex_lock(&answers_lock);
    bytes += snprintf(handle->text + bytes, COUNTS_BYTES - bytes, "peak %d\n", peak);
    pthread_mutex_unlock(&answers_lock);
    handle->text_bytes = bytes;
    return handle;
}

/* Open for this reader alone, or not if it is to fail. Return 0 or an error number. */
static int open_in_turn(struct node *node, struct handle *handle)
{
    unsigned number = node->num_opens++;
    handle->slow = happens(SLOW_FILES, node, 0) || happens(SLOW_OPENS, node, number);
    counts[SLOW] += handle->slow;
    if (happens(FAIL_OPENS, node, number) && !atomic_exchange(&node->just_failed, true)) {
        counts[FAILED]++;
        return EIO;
    }
    node->just_failed = false;
    handle->fd = openat(source_fd, node->path, O_RDONLY | O_CLOEXEC);
    return handle->fd < 0 ? errno : 0;
}

static void on_open(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *info)
{
    if ((info->flags & O_ACCMODE) != O_RDONLY) {
        fuse_reply_err(request, EROFS);
        return;
    }
    struct answer *answer = new_answer(request, ANSWER_OPEN, 0);
    struct handle *handle = !answer ? NULL : ino == COUNTS_INO ? counts_handle() : new_handle(0);
    if (!answer)
        return;
    answer->open = *info;
    answer->open.fh = (uintptr_t)handle;
    answer->open.direct_io = ino == COUNTS_INO || settings[PAGE_CACHE] == 0;
    answer->error = handle ? 0 : ENOMEM;
    if (!handle || ino == COUNTS_INO) {
        send_answer(answer);
        return;
    }
    answer->error = open_in_turn(node_of(ino), handle);
    bool slow = handle->slow;
    if (answer->error)
        free_handle(handle);
    answer_in_time(answer, OPEN_MS, slow);
}

static void read_text(fuse_req_t request, const struct handle *handle, size_t size, off_t offset)
{
    size_t start = (size_t)offset < handle->text_bytes ? (size_t)offset : handle->text_bytes;
    size_t left = handle->text_bytes - start;
    fuse_reply_buf(request, handle->text + start, size < left ? size : left);
}

static void on_read(fuse_req_t request, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *info)
{
    struct handle *handle = (struct handle *)(uintptr_t)info->fh;
    if (ino == COUNTS_INO) {
        read_text(request, handle, size, offset);
        return;
    }
    struct answer *answer = new_answer(request, ANSWER_DATA, size);
    if (!answer)
        return;
    ssize_t num_bytes = pread(handle->fd, answer->data, size, offset);
    answer->error = num_bytes < 0 ? errno : 0;
    answer->num_bytes = num_bytes < 0 ? 0 : (size_t)num_bytes;
    /* A client that knows the size, as those of network file systems do, answers a read past the end itself. */
    if (num_bytes == 0)
        send_answer(answer);
    else
        answer_in_time(answer, READ_MS, handle->slow);
}

static void on_release(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *info)
{
    struct handle *handle = (struct handle *)(uintptr_t)info->fh;
    bool slow = handle->slow;
    free_handle(handle);
    if (ino == COUNTS_INO) {
        fuse_reply_err(request, 0);
        return;
    }
    struct answer *answer = new_answer(request, ANSWER_ERROR, 0);
    if (answer)
        answer_in_time(answer, RELEASE_MS, slow);
}

static void on_opendir(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *info)
{
    struct handle *handle = new_handle(0);
    if (!handle) {
        fuse_reply_err(request, ENOMEM);
        return;
    }
    handle->fd = openat(source_fd, node_of(ino)->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    handle->directory = handle->fd < 0 ? NULL : fdopendir(handle->fd);
    info->fh = (uintptr_t)handle;
    int error = handle->directory ? 0 : errno;
    if (error)
        fuse_reply_err(request, error);
    if (error || fuse_reply_open(request, info) == -ENOENT)
        free_handle(handle);
}

static void on_readdir(fuse_req_t request, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *info)
{
    (void)ino;
    DIR *directory = ((struct handle *)(uintptr_t)info->fh)->directory;
    char *buffer = malloc(size);
    if (!buffer) {
        fuse_reply_err(request, ENOMEM);
        return;
    }
    size_t used = 0;
    struct dirent *entry;
    if (telldir(directory) != offset)
        seekdir(directory, offset);
    while ((entry = readdir(directory))) {
        /* Symbolic links are followed, so their kind is not known here. */
        mode_t kind = entry->d_type == DT_LNK ? 0 : DTTOIF(entry->d_type);
        struct stat status = {.st_ino = entry->d_ino, .st_mode = kind};
        size_t bytes = fuse_add_direntry(request, buffer + used, size - used, entry->d_name, &status, entry->d_off);
        if (bytes > size - used)
            break; /* telldir is past this entry: the next call seeks back to it */
        used += bytes;
    }
    fuse_reply_buf(request, buffer, used);
    free(buffer);
}

static void on_releasedir(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *info)
{
    (void)ino;
    free_handle((struct handle *)(uintptr_t)info->fh);
    fuse_reply_err(request, 0);
}

static const struct fuse_lowlevel_ops operations = {
    .init = on_init,
    .lookup = on_lookup,
    .getattr = on_getattr,
    .open = on_open,
    .read = on_read,
    .release = on_release,
    .opendir = on_opendir,
    .readdir = on_readdir,
    .releasedir = on_releasedir,
};

/* ---- start and end ---- */

static bool set(const char *text)
{
    const char *equals = strchr(text, '=');
    char *rest;
    double value = equals ? strtod(equals + 1, &rest) : 0;
    if (!equals || rest == equals + 1 || (*rest && *rest != '\n') || !(value >= 0))
        return false;
    for (int number = 0; number < NUM_SETTINGS; number++) {
        const char *name = setting_names[number];
        if (strlen(name) == (size_t)(equals - text) && strncmp(name, text, strlen(name)) == 0) {
            settings[number] = value;
            pthread_mutex_lock(&answers_lock);
            admit(); /* max_concurrent may have grown */
            pthread_mutex_unlock(&answers_lock);
            return true;
        }
    }
    return false;
}

/* End at once, operations under way included: their callers get an error. Only the first of the threads ends it. */
static void finish(void)
{
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&once);
    fuse_session_unmount(session);
    if (mountpoint_is_ours)
        rmdir(mountpoint);
    _exit(0);
}

static void *finish_on_signal(void *signals)
{
    int number;
    sigwait(signals, &number);
    finish();
    return NULL;
}

static void *finish_on_eof(void *unused)
{
    (void)unused;
    char line[256];
    while (fgets(line, sizeof line, stdin)) {
        puts(set(line) ? "ok" : "not a setting, or not a number of at least 0");
        fflush(stdout);
    }
    finish();
    return NULL;
}

static void fail(const char *what)
{
    fprintf(stderr, "slowfs: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void start_thread(void *(*run)(void *), void *argument)
{
    pthread_t thread;
    if ((errno = pthread_create(&thread, NULL, run, argument)) != 0)
        fail("cannot start a thread");
    pthread_detach(thread);
}

static void read_arguments(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: slowfs SOURCE MOUNTPOINT [NAME=VALUE ...]\n");
        exit(2);
    }
    for (int number = 3; number < argc; number++)
        if (!set(argv[number])) {
            fprintf(stderr, "slowfs: not a setting, or not a number of at least 0: %s\n", argv[number]);
            exit(2);
        }
    if ((source_fd = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0)
        fail(argv[1]);
    if (mkdir(argv[2], 0755) == 0)
        mountpoint_is_ours = true;
    else if (errno != EEXIST)
        fail(argv[2]);
    if (!(mountpoint = realpath(argv[2], NULL)) || !(root = node_at(".")))
        fail(argv[2]);
}

static void mount_session(void)
{
    char *words[] = {"slowfs", "-o", "ro,fsname=slowfs,subtype=slowfs", NULL};
    struct fuse_args arguments = FUSE_ARGS_INIT(3, words);
    session = fuse_session_new(&arguments, &operations, sizeof operations, NULL);
    if (session && fuse_session_mount(session, mountpoint) == 0)
        return;
    if (mountpoint_is_ours)
        rmdir(mountpoint);
    exit(1); /* libfuse has said why */
}

int main(int argc, char **argv)
{
    static sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &signals, NULL); /* in the threads to come as well */
    signal(SIGPIPE, SIG_IGN);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&first_changed, &monotonic);
    read_arguments(argc, argv);
    mount_session();
    start_thread(finish_on_signal, &signals);
    start_thread(send_when_due, NULL);
    if (settings[UNTIL_EOF] > 0)
        start_thread(finish_on_eof, NULL);
    puts("mounted");
    fflush(stdout);
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    /* A thread a core: they never wait for a delay, and more of them spend up to half as much again on waking up. */
    unsigned num_threads = (unsigned)sysconf(_SC_NPROCESSORS_ONLN);
    fuse_loop_cfg_set_max_threads(config, num_threads);
    fuse_loop_cfg_set_idle_threads(config, num_threads);
    fuse_session_loop_mt(session, config);
    finish();
}
