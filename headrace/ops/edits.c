/* Penalties and allow-lists on rows of logits, in place: edits.py says what they are. A tile of
 * tokens that were never seen, as most are, is not touched: its logits are not even read. */
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
void *openmp(void) { return (void *)omp_get_max_threads; } /* cbuild asks whose runtime it is */
#else
void *openmp(void) { return NULL; }
#endif
#define TILE 64
#define PROMPT (1 << 30)

/* bfloat16 of the nearest value, ties to even; a NaN stays one. */
static inline uint16_t round_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline float widen(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* What is left of a logit. Without branches, so that gcc makes vector code of the loops. */
static inline float penalized(float x, int32_t seen, float repetition, float presence,
                              float frequency) {
    int32_t count = seen & (PROMPT - 1);
    float factor = seen ? repetition : 1.0f;
    x = x / (x > 0 ? factor : 1.0f) * (x > 0 ? 1.0f : factor);
    return x - frequency * (float)count - (count ? presence : 0.0f);
}

static void penalize_row(char *row, int bf16, int64_t vocab, const int32_t *restrict seen,
                         float repetition, float presence, float frequency) {
    uint16_t *half = (uint16_t *)row;
    float *full = (float *)row;
    for (int64_t i = 0; i < vocab; i += TILE) {
        int64_t end = i + TILE < vocab ? i + TILE : vocab;
        int32_t any = 0;
        for (int64_t v = i; v < end; v++) any |= seen[v];
        if (!any) continue;
        if (bf16)
            for (int64_t v = i; v < end; v++)
                half[v] = round_bf16(
                    penalized(widen(half[v]), seen[v], repetition, presence, frequency));
        else
            for (int64_t v = i; v < end; v++)
                full[v] = penalized(full[v], seen[v], repetition, presence, frequency);
    }
}

/* Entries of `row` and `slot` outside the tables are passed over. Strides in elements. */
void hr_penalize(char *logits, int bf16, int64_t rows, int64_t vocab, int64_t stride,
                 const int32_t *seen, int64_t slots, int64_t seen_stride, int64_t count,
                 const int64_t *row, const int64_t *slot, const float *repetition,
                 const float *presence, const float *frequency, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t p = 0; p < count; p++)
        if (row[p] >= 0 && row[p] < rows && slot[p] >= 0 && slot[p] < slots)
            penalize_row(logits + row[p] * stride * (bf16 ? 2 : 4), bf16, vocab,
                         seen + slot[p] * seen_stride, repetition[p], presence[p], frequency[p]);
}

/* Entries of `row` outside the logits are passed over. `allowed` has `words` words a row. */
void hr_allow(char *logits, int bf16, int64_t rows, int64_t vocab, int64_t stride, int64_t count,
              const int64_t *row, const uint32_t *allowed, int64_t words, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t a = 0; a < count; a++) {
        if (row[a] < 0 || row[a] >= rows) continue;
        uint16_t *half = (uint16_t *)logits + row[a] * stride;
        uint32_t *full = (uint32_t *)logits + row[a] * stride;
        for (int64_t w = 0; w < words; w++) {
            uint32_t bits = allowed[a * words + w];
            int64_t n = vocab - w * 32 < 32 ? vocab - w * 32 : 32;
            for (int64_t j = 0, v = w * 32; j < n; j++, v++)
                if (bf16)
                    half[v] = bits >> j & 1 ? half[v] : 0xff80; /* -inf */
                else
                    full[v] = bits >> j & 1 ? full[v] : 0xff800000;
        }
    }
}
