// An OpenCL library for tests that shows one device and compiles nothing. Variables of the environment say
// what the device is like:
//   FAKE_VERSION     its version, as "OpenCL 3.0 Fake"
//   FAKE_EXTENSIONS  its extensions
//   FAKE_SVM         its capabilities of shared virtual memory
//   FAKE_SUBGROUP    its size of subgroups
//   FAKE_TYPE        its type: 4 is a GPU, 2 a CPU
#include <cstdint>
#include <cstdlib>
#include <cstring>

static const char *text(const char *name, const char *otherwise) {
    const char *given = std::getenv(name);
    return given ? given : otherwise;
}
static uint64_t number(const char *name, const char *otherwise) { return std::strtoull(text(name, otherwise), nullptr, 10); }

// Answers a question for bytes or for their number.
static int answer(const void *from, size_t len, size_t room, void *to, size_t *n) {
    if (n) *n = len;
    if (to && room < len) return -30;
    if (to) std::memcpy(to, from, len);
    return 0;
}
static int answer(const char *from, size_t room, void *to, size_t *n) { return answer(from, std::strlen(from) + 1, room, to, n); }

static char thing;

#define OPENCL extern "C" int
#define OBJECT extern "C" void *
OPENCL clGetPlatformIDs(unsigned room, void **to, unsigned *n) {
    if (n) *n = 1;
    if (room && to) *to = &thing;
    return 0;
}
OPENCL clGetDeviceIDs(void *, uint64_t type, unsigned room, void **to, unsigned *n) {
    if (!(type & number("FAKE_TYPE", "4"))) return -1;
    if (n) *n = 1;
    if (room && to) *to = &thing;
    return 0;
}
OPENCL clGetDeviceInfo(void *, unsigned which, size_t room, void *to, size_t *n) {
    uint64_t value = 0;
    switch (which) {
    case 0x102B: return answer("Fake GPU", room, to, n);
    case 0x102D: return answer("1.0", room, to, n);
    case 0x102F: return answer(text("FAKE_VERSION", "OpenCL 3.0 Fake"), room, to, n);
    case 0x1030:
        return answer(text("FAKE_EXTENSIONS", "cl_khr_fp16 cl_khr_subgroup_shuffle cl_intel_required_subgroup_size"), room,
                      to, n);
    case 0x1053: value = number("FAKE_SVM", "1"); break;
    case 0x4108: value = number("FAKE_SUBGROUP", "32"); break;
    case 0x101F: case 0x1010: value = uint64_t(16) << 30; break;
    case 0x1023: value = 64 << 10; break;
    }
    return answer(&value, sizeof value, room, to, n);
}
OBJECT clCreateContext(void *, unsigned, void *, void *, void *, int *status) { *status = 0; return &thing; }
OBJECT clCreateCommandQueueWithProperties(void *, void *, void *, int *status) { *status = 0; return &thing; }
OBJECT clCreateProgramWithSource(void *, unsigned, const char **, const size_t *, int *status) { *status = 0; return &thing; }
OPENCL clBuildProgram(void *, unsigned, void *, const char *, void *, void *) { return -11; }
OPENCL clGetProgramBuildInfo(void *, void *, unsigned, size_t room, void *to, size_t *n) {
    return answer("1:2:1: error: unknown type name 'template'\n", room, to, n);
}
OPENCL clReleaseProgram(void *) { return 0; }
// Never called, but looked up.
#define UNUSED(name) OPENCL name() { std::abort(); }
UNUSED(clCreateKernel)
UNUSED(clReleaseKernel)
UNUSED(clGetKernelWorkGroupInfo)
UNUSED(clGetKernelSubGroupInfo)
UNUSED(clSetKernelArg)
UNUSED(clSetKernelArgSVMPointer)
UNUSED(clSVMAlloc)
UNUSED(clEnqueueSVMFree)
UNUSED(clEnqueueSVMMemFill)
UNUSED(clEnqueueSVMMemcpy)
UNUSED(clEnqueueNDRangeKernel)
UNUSED(clFlush)
UNUSED(clFinish)
