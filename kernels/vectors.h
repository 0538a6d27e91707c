/* Vectors of floats, as wide as the processor has them, for the C kernels. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

/* A build may say how many; where the processor has narrower vectors, the compiler makes one of several. */
#ifndef LANES
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#endif
_Static_assert(LANES == 4 || LANES == 8 || LANES == 16, "vectors are read as fours, and lanes are counted to 16");

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float quad __attribute__((vector_size(16)));
typedef float half __attribute__((vector_size(2 * LANES)));
typedef double wide __attribute__((vector_size(4 * LANES))); /* of half as many numbers */

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t round_up(int64_t a, int64_t to) { return (a + to - 1) / to * to; }
static inline vec all(float s) { return s - (vec){0}; }

/* Half of the lanes, in float64. */
static inline wide widened(vec v, int second) { return __builtin_convertvector(((const half *)&v)[second], wide); }

static inline double wide_sum(wide v) {
    double sum = v[0];
    for (int i = 1; i < LANES / 2; i++) sum += v[i];
    return sum;
}

static inline double lane_sum(vec v) { return wide_sum(widened(v, 0) + widened(v, 1)); }

/* a where the mask is set, else b */
static inline vec chosen(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

static inline vec get(const float *from) { return *(const unaligned_vec *)from; }

static inline void put(float *to, vec v) { *(unaligned_vec *)to = v; }

static inline float sum_of(const vec *v) {
    const quad *part = (const quad *)v;
    quad sum = part[0];
    for (int i = 1; i < LANES / 4; i++) sum += part[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* 2^z for z <= 0 (right up to 127, and infinite at 128): relative error 2e-7, exactly 1 at 0, exactly 0 below -127, NaN for NaN.
   z = k + f with |f| <= 1/2 by adding and subtracting 1.5 * 2^23, in whose last bits k + 127 then stands: shifted, it is 2^k.
   2^f = 1 + f q(f), q fitted to the relative error; no rounding of q moves exp near 0, where errors would add up over time. */
static inline vec exp2_vec(vec z) {
    const vec lowest = all(-127.0f), magic = all(12582912.0f + 127.0f);
    z = chosen(z < lowest, lowest, z);
    vec shifted = z + magic;
    vec f = z - (shifted - magic);
    vec q = all(1.32647273e-3f) * f + 9.67151299e-3f;
    q = q * f + 5.55073358e-2f;
    q = q * f + 2.40222424e-1f;
    q = q * f + 6.93147004e-1f;
    return (q * f + 1.0f) * (vec)((ivec)shifted << 23);
}

/* ---- blocks: ROWS x WIDE numbers that stay in registers, of which all products are made ---- */

#ifndef ROWS
#if defined(__AVX512F__) || defined(__aarch64__) /* 32 registers */
#define ROWS 8
#else
#define ROWS 4
#endif
#endif
#define COLS 2
#define WIDE (COLS * LANES)
/* Without this, compilers read a vector again for every product, and reading takes longer than multiplying. */
#if defined(__AVX512F__) && LANES == 16
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#elif defined(__SSE__) && (LANES == 4 || (defined(__AVX__) && LANES == 8))
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#else
#define IN_REGISTER(v)
#endif

/* out[m] += sum_k left[m, k] right[k] for `rows` values of m and `cols` vectors of a panel of WIDE columns. The right factor is read
   as vectors, the left one number by number. `rows` and `cols` are constants where this is called. */
INLINE void multiply(const int rows, const int cols, vec out[ROWS][COLS], const float *left, int64_t by_m, int64_t by_k,
                     const float *right, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        vec row[COLS];
        for (int c = 0; c < cols; c++) {
            row[c] = ((const vec *)right)[k * COLS + c];
            IN_REGISTER(row[c]);
        }
        for (int m = 0; m < rows; m++)
            for (int c = 0; c < cols; c++) out[m][c] += left[m * by_m + k * by_k] * row[c];
    }
}

/* the first halves of a and b, their numbers in turn, and the second halves */
INLINE quad zip_low(quad a, quad b) { return (quad){a[0], b[0], a[1], b[1]}; }
INLINE quad zip_high(quad a, quad b) { return (quad){a[2], b[2], a[3], b[3]}; }

INLINE void transpose4x4(quad x[4]) {
    const quad even = zip_low(x[0], x[2]), odd = zip_low(x[1], x[3]), even2 = zip_high(x[0], x[2]), odd2 = zip_high(x[1], x[3]);
    x[0] = zip_low(even, odd), x[1] = zip_high(even, odd), x[2] = zip_low(even2, odd2), x[3] = zip_high(even2, odd2);
}

/* Numbers too small for a normal float32 are 0 between these two. What fades away, a state or a gradient, would else stay among
   them, where processors are slow. */
typedef uint64_t status;
static inline status flush(void) {
#if defined(__SSE__)
    status before = _mm_getcsr();
    _mm_setcsr((unsigned)before | 0x8040);
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | 1 << 24));
    return before;
#else
    return 0;
#endif
}

static inline void restore(status before) {
#if defined(__SSE__)
    _mm_setcsr((unsigned)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}
