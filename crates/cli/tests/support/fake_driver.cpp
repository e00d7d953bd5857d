// A driver for tests that has one device and computes nothing. Variables of the environment say how it
// starts, and what it fails at:
//   FAKE_INIT      what cuInit returns
//   FAKE_VERSION   the newest CUDA version that it knows, as 12040
//   FAKE_DEVICES   how many devices it has
//   FAKE_MAJOR     the compute capability of the last device; the others have 8
//   FAKE_FREE      bytes of memory that are free
//   FAKE_MODULES   how many modules it loads
//   FAKE_LOG       a file that gets a line for each wait, each write and each piece of memory that is freed
//   FAKE_BUSY      1: the first wait takes until something was written, or ten seconds
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

static long setting(const char *name, long otherwise) {
    const char *text = std::getenv(name);
    return text ? std::atol(text) : otherwise;
}

static void note(const char *call) {
    const char *path = std::getenv("FAKE_LOG");
    if (!path) return;
    std::FILE *log = std::fopen(path, "a");
    std::fprintf(log, "%s\n", call);
    std::fclose(log);
}

static std::atomic<long> n_written{0};

static char thing;
static long n_loaded = 0;

#define DRIVER extern "C" int

DRIVER cuInit(unsigned) { return setting("FAKE_INIT", 0); }
DRIVER cuDriverGetVersion(int *out) { *out = setting("FAKE_VERSION", 12040); return 0; }
DRIVER cuDeviceGetCount(int *out) { *out = setting("FAKE_DEVICES", 1); return 0; }
DRIVER cuDeviceGet(int *out, int ordinal) { *out = ordinal; return 0; }
DRIVER cuDeviceGetAttribute(int *out, int which, int device) {
    bool is_last = device + 1 == setting("FAKE_DEVICES", 1);
    *out = which == 75 ? (is_last ? setting("FAKE_MAJOR", 9) : 8) : 0;
    return 0;
}
DRIVER cuDeviceGetName(char *out, int len, int) { std::strncpy(out, "Fake GPU", len); return 0; }
DRIVER cuGetErrorString(int, const char **out) { *out = "in other words"; return 0; }
DRIVER cuDevicePrimaryCtxRetain(void **out, int) { *out = &thing; return 0; }
DRIVER cuDevicePrimaryCtxRelease_v2(int) { return 0; }
DRIVER cuCtxSetCurrent(void *) { return 0; }
DRIVER cuStreamCreate(void **out, unsigned) { *out = &thing; return 0; }
DRIVER cuStreamDestroy_v2(void *) { return 0; }
DRIVER cuStreamSynchronize(void *) {
    note("wait");
    static std::atomic<long> n_waits{0};
    bool is_busy = setting("FAKE_BUSY", 0) && n_waits++ == 0;
    for (int i = 0; is_busy && n_written == 0 && i < 1000; ++i) usleep(10000);
    note("waited");
    return 0;
}
DRIVER cuEventCreate(void **out, unsigned) { *out = &thing; return 0; }
DRIVER cuEventDestroy_v2(void *) { return 0; }
DRIVER cuEventRecord(void *, void *) { return 0; }
DRIVER cuEventSynchronize(void *) { return 0; }
DRIVER cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = setting("FAKE_FREE", 8l << 30);
    *total = 16l << 30;
    return 0;
}
DRIVER cuMemHostAlloc(void **out, size_t len, unsigned) { *out = std::malloc(len); return 0; }
DRIVER cuMemFreeHost(void *bytes) { std::free(bytes); return 0; }
DRIVER cuMemAlloc_v2(unsigned long long *out, size_t) { *out = 1 << 20; return 0; }
DRIVER cuMemFree_v2(unsigned long long) { note("free"); return 0; }
DRIVER cuMemsetD8Async(unsigned long long, unsigned char, size_t, void *) { return 0; }
DRIVER cuMemcpyHtoDAsync_v2(unsigned long long, const void *, size_t, void *) {
    note("write");
    ++n_written;
    return 0;
}
DRIVER cuMemcpyDtoHAsync_v2(void *, unsigned long long, size_t, void *) { return 0; }
DRIVER cuModuleLoadDataEx(void **out, const void *, unsigned n, const int *options, void **values) {
    *out = &thing;
    if (n_loaded++ < setting("FAKE_MODULES", 1 << 20)) return 0;
    // 5 is CU_JIT_ERROR_LOG_BUFFER, 218 CUDA_ERROR_INVALID_PTX.
    for (unsigned i = 0; i < n; ++i)
        if (options[i] == 5) strcpy(static_cast<char *>(values[i]), "ptxas input, line 7\n  parsing error\n");
    return 218;
}
DRIVER cuModuleUnload(void *) { return 0; }
DRIVER cuModuleGetFunction(void **out, void *, const char *) { *out = &thing; return 0; }
