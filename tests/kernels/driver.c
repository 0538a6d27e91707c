/* Calls a function of a C kernel on another machine than Python's, or in a build that Python cannot load (a sanitizer's).

   Standard input: the function's name (32 bytes), threads, bytes of the kernel's structure, number of tensors (int64 each), the
   structure; and for each tensor where its address stands in the structure, its bytes (int64 each), and what it holds. Standard
   output: the function's result (int64), the structure, and what the tensors hold then. Compiled with -DKERNEL="ssd.c",
   -DSTRUCTURE=scan and -DFUNCTIONS=F(scan_forward)F(...). Every tensor lies in memory of its own, so that a sanitizer sees
   the smallest step beside it. */

#include KERNEL

#include <pthread.h>
#include <stdio.h>

typedef int64_t (*function)(STRUCTURE *);
#define F(name) {#name, (function)name},
static const struct {
    const char *name;
    function call;
} functions[] = {FUNCTIONS};

static void get_bytes(void *to, size_t count) {
    if (fread(to, 1, count, stdin) != count) exit(3);
}

static int64_t get_number(void) {
    int64_t number;
    get_bytes(&number, sizeof number);
    return number;
}

static STRUCTURE work_of_all;
static function called;
static int64_t result;

static void *one_thread(void *unused) {
    called(&work_of_all);
    return unused;
}

/* A function without a result leaves anything where another has one: only one that has one is called by this. */
static int has_result(const char *name) { return !strcmp(name, "kept_floats"); }

int main(void) {
    char name[32];
    get_bytes(name, sizeof name);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!strcmp(functions[i].name, name)) called = functions[i].call;
    if (!called) return 4;
    int64_t threads = get_number(), bytes = get_number(), tensors = get_number();
    if (bytes != sizeof work_of_all) return 5;
    get_bytes(&work_of_all, bytes);
    int64_t *sizes = calloc(tensors + 1, sizeof *sizes);
    void **places = calloc(tensors + 1, sizeof *places);
    for (int64_t i = 0; i < tensors; i++) {
        int64_t offset = get_number();
        sizes[i] = get_number();
        if (posix_memalign(&places[i], 16, sizes[i])) return 6;
        get_bytes(places[i], sizes[i]);
        memcpy((char *)&work_of_all + offset, &places[i], sizeof places[i]);
    }
    if (has_result(name)) result = called(&work_of_all);
    else {
        pthread_t team[16];
        for (int64_t i = 1; i < threads; i++) pthread_create(&team[i], 0, one_thread, 0);
        one_thread(0);
        for (int64_t i = 1; i < threads; i++) pthread_join(team[i], 0);
    }
    fwrite(&result, sizeof result, 1, stdout);
    fwrite(&work_of_all, sizeof work_of_all, 1, stdout);
    for (int64_t i = 0; i < tensors; i++) fwrite(places[i], 1, sizes[i], stdout), free(places[i]);
    free(sizes), free(places);
    return 0;
}
