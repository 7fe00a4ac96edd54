/* Greedy and Gumbel-max sampling on the CPU: for each row, argmax over v of x[v] / T + gumbel(v).
 *
 * Plain loops over tiles of 256 lanes, written so that gcc makes vector code of each; noise.py says
 * what words and gumbel are. One thread owns a row, so a row's result cannot know its batch. Logits
 * below the row's floor count as -inf; a tile of nothing else needs no noise. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
void *openmp(void) { return (void *)omp_get_max_threads; } /* cbuild asks whose runtime it is */
#else
void *openmp(void) { return NULL; }
#endif
#define TILE 256 /* a multiple of 4: Philox makes four lanes a block */

static inline float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

/* The order of floats as one of int32: a float maximum does not vectorise without -ffast-math. NaN
 * is seen apart; adding 0 makes both zeros one. */
static inline int32_t order(float x) {
    int32_t bits = (int32_t)as_bits(x + 0.0f);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

/* log of a positive normal float, within 2 ulp: x = 2^k (1 + f), 1 + f in [sqrt(1/2), sqrt(2)). */
static inline float log_normal(float x) {
    int32_t k = (int32_t)(as_bits(x) - 0x3f3504f3u) >> 23;
    float f = as_float(as_bits(x) - ((uint32_t)k << 23)) - 1.0f, z = f * f, e = (float)k;
    float p = 7.0376836292e-2f * f - 1.1514610310e-1f;
    p = (p * f + 1.1676998740e-1f) * f - 1.2420140846e-1f;
    p = (p * f + 1.4249322787e-1f) * f - 1.6668057665e-1f;
    p = (p * f + 2.0000714765e-1f) * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    return (f + (f * z * p - 2.12194440e-4f * e - 0.5f * z)) + 0.693359375f * e;
}

/* AVX2 converts only signed integers: the halves are exact, and their sum rounds once, as
 * float(word) does. Choices are made on bits (ordered like their positive floats), because gcc
 * vectorises no float operation that only one branch would do. */
static inline float gumbel(uint32_t word) {
    float f = (float)(int32_t)(word >> 16) * 65536.0f + (float)(int32_t)(word & 0xffff);
    uint32_t bits = as_bits((f + 0.5f) * 0x1p-32f), unit = as_bits(1.0f);
    float u = as_float(bits < unit ? bits : unit - 1), v = 1.0f - u;
    float is_one = as_float(as_bits(v) / unit * unit);
    return -log_normal(is_one * u - log_normal(v) * u / (1.0f - v + is_one));
}

/* The words of TILE lanes from `lane`, a multiple of 4. */
static void tile_words(uint64_t seed, uint32_t stream, uint32_t position, uint32_t attempt,
                       uint32_t lane, uint32_t *restrict w) {
    for (uint32_t i = 0; i < TILE / 4; i++) {
        uint32_t c0 = lane / 4 + i, c1 = position, c2 = attempt, c3 = stream;
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c1 = (uint32_t)p1;
            c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1, c3 = (uint32_t)p0;
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        w[4 * i] = c0, w[4 * i + 1] = c1, w[4 * i + 2] = c2, w[4 * i + 3] = c3;
    }
}

/* n logits as fp32; -inf fills the tile. */
static void load(const void *src, int bf16, int64_t n, float *restrict x) {
    if (bf16)
        for (int64_t j = 0; j < n; j++) x[j] = as_float((uint32_t)((const uint16_t *)src)[j] << 16);
    else
        memcpy(x, src, (size_t)n * sizeof(float));
    for (int64_t j = n; j < TILE; j++) x[j] = -INFINITY;
}

/* Ties go to the lowest id; a row that holds a NaN, or nothing but -inf, gives -1. */
static int64_t sample_row(const char *row, int bf16, int64_t vocab, int random, float temperature,
                          uint64_t seed, uint32_t position, float floor) {
    float x[TILE];
    uint32_t w[TILE];
    int32_t best = order(-INFINITY), nan = 0;
    int64_t id = -1;
    for (int64_t i = 0; i < vocab; i += TILE) {
        load(row + i * (bf16 ? 2 : 4), bf16, vocab - i < TILE ? vocab - i : TILE, x);
        int32_t some = 0;
        for (int j = 0; j < TILE; j++) {
            x[j] = x[j] < floor ? -INFINITY : x[j];
            some |= x[j] != -INFINITY;
        }
        if (some && random) {
            tile_words(seed, 0, position, 0, (uint32_t)i, w);
            for (int j = 0; j < TILE; j++) x[j] = x[j] / temperature + gumbel(w[j]);
        }
        int32_t top = best;
        for (int j = 0; j < TILE; j++) {
            nan |= x[j] != x[j];
            top = order(x[j]) > top ? order(x[j]) : top;
        }
        if (top == best) continue;
        for (best = top, id = i; order(x[id - i]) != top; id++) {}
    }
    return nan ? -1 : id;
}

/* temperature NULL: every row is greedy; else rows below `coldest` are. floor NULL: none. Stride in
 * elements. */
void hr_sample(const char *logits, int bf16, int64_t rows, int64_t vocab, int64_t stride,
               const float *temperature, float coldest, const int64_t *seed,
               const int64_t *position, const float *floor, int64_t *ids, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        int random = temperature && temperature[r] >= coldest;
        const char *row = logits + r * stride * (bf16 ? 2 : 4);
        float least = floor ? floor[r] : -INFINITY;
        ids[r] = !random ? sample_row(row, bf16, vocab, 0, 1.0f, 0, 0, least)
                         : sample_row(row, bf16, vocab, 1, temperature[r], (uint64_t)seed[r],
                                      (uint32_t)position[r], least);
    }
}

/* For the tests: the words of n lanes from 0, n a multiple of TILE; the noise that n words make. */
void hr_words(uint64_t seed, uint32_t stream, uint32_t position, uint32_t attempt, int64_t n,
              uint32_t *w) {
    for (uint32_t i = 0; i < n; i += TILE) tile_words(seed, stream, position, attempt, i, w + i);
}
void hr_gumbel(int64_t n, const uint32_t *w, float *noise) {
    for (int64_t i = 0; i < n; i++) noise[i] = gumbel(w[i]);
}
