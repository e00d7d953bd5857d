// Stands in for Metal's library where kernels are type-checked as C++ for OpenCL, whose address spaces
// are those of Metal by other names. Only declarations: nothing of this runs.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef ulong ulong2 __attribute__((ext_vector_type(2)));
enum memory_order { memory_order_relaxed };
#define INFINITY __builtin_inff()
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
struct bfloat {
  ushort bits;
};
enum class mem_flags { mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
float simd_max(float);
bool simd_any(bool);
uint atomic_fetch_add_explicit(volatile threadgroup atomic_uint *, uint, memory_order);
float fma(float, float, float);
typedef half half2 __attribute__((ext_vector_type(2)));
half2 fma(half2, half2, half2);
float fmax(float, float);
float fmin(float, float);
float fabs(float);
float sqrt(float);
float exp(float);
float exp2(float);
float log(float);
float tanh(float);
float rint(float);
float trunc(float);
template <class T> T simd_shuffle(T, ushort);
template <class T> T simd_shuffle_xor(T, ushort);
// As the specification has them, but for products of several types, which Apple's headers have.
template <class T, int Columns, int Rows> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8);
};
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
template <class T, int C, int R> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
template <class T, int C, int R>
void simdgroup_load(thread simdgroup_matrix<T, C, R> &, const threadgroup T *, ulong elements_per_row = C,
                    ulong2 matrix_origin = 0, bool transpose_matrix = false);
template <class T, int C, int R>
void simdgroup_store(thread simdgroup_matrix<T, C, R>, threadgroup T *, ulong elements_per_row = C,
                     ulong2 matrix_origin = 0, bool transpose_matrix = false);
template <class D, class A, class B, int C, int R, int K>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, C, R> &d, thread simdgroup_matrix<A, K, R> &a,
                                   thread simdgroup_matrix<B, C, K> &b, thread simdgroup_matrix<D, C, R> &c);
template <class To, class From> To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}
} // namespace metal
