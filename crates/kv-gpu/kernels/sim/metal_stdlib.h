// Stands in for Metal's library where kernels are type-checked as C++ for OpenCL, whose address spaces
// are those of Metal by other names. Only declarations: nothing of this runs.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __global const
#define threadgroup __local
#define thread __private
#define uint8_t uchar
#define int8_t char
#define uint16_t ushort
#define int16_t short
#define uint32_t uint
#define int32_t int
#define uint64_t ulong
namespace metal {
enum class mem_flags { mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
float simd_max(float);
uint simd_prefix_exclusive_sum(uint);
template <class T> T simd_shuffle(T, ushort);
template <class T> T simd_shuffle_xor(T, ushort);
template <class To, class From> To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}
} // namespace metal
