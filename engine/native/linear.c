/* Linear layers with bfloat16 weights and float32 arithmetic, for x86 CPUs that have AVX2 and no bfloat16 products.
 *
 * A decode step reads every weight once and does little with it, so its time is that of reading: half the bytes are
 * half the time. A bfloat16 is the upper half of a float32, so that widening costs a shift or a mask.
 *
 *   weights   [n, k], row by row: y[m, n] = sum over k of x[m, k] * weights[n, k]
 *   panel     16 outputs: for each k 16 weights, as 8 words of 32 bits; word i holds output i in its lower half and
 *             output 8 + i in its upper half. The last panel is filled up with zeros.
 *
 * Each y[m, n] is one chain of fused multiply-adds from k = 0 upwards, whatever m, the tile or the number of threads:
 * a row's result does not depend on the rows beside it.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define PANEL 16

/* Bytes that hold the packed weights. */
EXPORT size_t pdmm_packed_bytes(size_t n, size_t k)
{
    return (n + PANEL - 1) / PANEL * PANEL * k * sizeof(uint16_t);
}

EXPORT void pdmm_pack(const uint16_t *weights, size_t n, size_t k, uint16_t *packed)
{
    for (size_t first = 0; first < n; first += PANEL) {
        uint16_t *panel = packed + first * k;
        for (size_t i = 0; i < PANEL; i++) {
            uint16_t *place = panel + (i < 8 ? 2 * i : 2 * (i - 8) + 1);
            const uint16_t *row = weights + (first + i) * k;
            for (size_t j = 0; j < k; j++)
                place[j * PANEL] = first + i < n ? row[j] : 0;
        }
    }
}

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))
#define INLINE TARGET static inline __attribute__((always_inline))

/* One call: a share of the panels is a thread's. */
struct job {
    const float *x;
    size_t m, x_stride;
    const uint16_t *packed;
    size_t n, k;
    const float *bias;     /* [n], or NULL */
    const float *residual; /* [m, n], or NULL */
    float *y;              /* [m, n] */
};

INLINE void store(const struct job *job, size_t row, size_t first, __m256 low, __m256 high)
{
    float values[PANEL];
    _mm256_storeu_ps(values, low);
    _mm256_storeu_ps(values + 8, high);
    float *y = job->y + row * job->n + first;
    size_t width = job->n - first < PANEL ? job->n - first : PANEL;
    if (job->bias)
        for (size_t i = 0; i < width; i++)
            values[i] += job->bias[first + i];
    if (job->residual)
        for (size_t i = 0; i < width; i++)
            values[i] += job->residual[row * job->n + first + i];
    memcpy(y, values, width * sizeof(float));
}

/* `rows` rows by `panels` panels, both constants where it is used, so that the sums stay in registers. */
INLINE void tile(const struct job *job, size_t row, size_t first, const int rows, const int panels)
{
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);
    const size_t k = job->k;
    const uint16_t *weights = job->packed + first * k;
    const float *x = job->x + row * job->x_stride;
    __m256 low[6][4], high[6][4];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            low[r][p] = high[r][p] = _mm256_setzero_ps();
    for (size_t j = 0; j < k; j++)
        for (int p = 0; p < panels; p++) {
            __m256i words = _mm256_loadu_si256((const __m256i *)(weights + ((size_t)p * k + j) * PANEL));
            __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
            __m256 b = _mm256_castsi256_ps(_mm256_and_si256(words, upper));
            for (int r = 0; r < rows; r++) {
                __m256 value = _mm256_broadcast_ss(x + (size_t)r * job->x_stride + j);
                low[r][p] = _mm256_fmadd_ps(value, a, low[r][p]);
                high[r][p] = _mm256_fmadd_ps(value, b, high[r][p]);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            store(job, row + (size_t)r, first + (size_t)p * PANEL, low[r][p], high[r][p]);
}

/* Panels [begin, end) of `rows` rows: as many panels at once as hide the latency of the additions. */
#define BAND(rows, panels)                                                                                             \
    TARGET static void band_##rows(const struct job *job, size_t row, size_t begin, size_t end)                        \
    {                                                                                                                  \
        size_t panel = begin;                                                                                          \
        for (; panel + panels <= end; panel += panels)                                                                 \
            tile(job, row, panel * PANEL, rows, panels);                                                               \
        for (; panel < end; panel++)                                                                                   \
            tile(job, row, panel * PANEL, rows, 1);                                                                    \
    }

BAND(1, 4)
BAND(2, 2)
BAND(3, 2)
BAND(4, 1)
BAND(5, 1)
BAND(6, 1)

typedef void (*band_t)(const struct job *job, size_t row, size_t begin, size_t end);

static const band_t bands[] = {NULL, band_1, band_2, band_3, band_4, band_5, band_6};

/* The panels of one thread. Few rows go through once; many are taken by bands within a panel, which then stays in the
 * core's cache. */
static void run_share(const struct job *job, size_t begin, size_t end)
{
    if (job->m <= 6) {
        bands[job->m](job, 0, begin, end);
        return;
    }
    for (size_t panel = begin; panel < end; panel++) {
        size_t row = 0;
        for (; row + 6 <= job->m; row += 6)
            band_6(job, row, panel, panel + 1);
        if (row < job->m)
            bands[job->m - row](job, row, panel, panel + 1);
    }
}

/* The threads are those of the OpenMP runtime that torch computes with; see `pdmm_threads`. */
static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_number)(void);
static int (*thread_count)(void);

static void share_of_thread(void *data)
{
    const struct job *job = data;
    size_t panels = (job->n + PANEL - 1) / PANEL;
    size_t count = (size_t)thread_count(), number = (size_t)thread_number();
    run_share(job, panels * number / count, panels * (number + 1) / count);
}

EXPORT int pdmm_supported(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

/* Use these functions of an OpenMP runtime: GOMP_parallel, omp_get_thread_num, omp_get_num_threads. */
EXPORT void pdmm_threads(void *gomp_parallel, void *get_thread_num, void *get_num_threads)
{
    parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))gomp_parallel;
    thread_number = (int (*)(void))get_thread_num;
    thread_count = (int (*)(void))get_num_threads;
}

EXPORT void pdmm_linear(const float *x, size_t m, size_t x_stride, const uint16_t *packed, size_t n, size_t k,
                        const float *bias, const float *residual, float *y, unsigned threads)
{
    struct job job = {x, m, x_stride, packed, n, k, bias, residual, y};
    if (threads > 1 && parallel)
        parallel(share_of_thread, &job, threads, 0);
    else
        run_share(&job, 0, (n + PANEL - 1) / PANEL);
}

#else

EXPORT int pdmm_supported(void)
{
    return 0;
}

EXPORT void pdmm_threads(void *gomp_parallel, void *get_thread_num, void *get_num_threads)
{
    (void)gomp_parallel, (void)get_thread_num, (void)get_num_threads;
}

EXPORT void pdmm_linear(const float *x, size_t m, size_t x_stride, const uint16_t *packed, size_t n, size_t k,
                        const float *bias, const float *residual, float *y, unsigned threads)
{
    (void)x, (void)m, (void)x_stride, (void)packed, (void)n, (void)k;
    (void)bias, (void)residual, (void)y, (void)threads;
}

#endif
