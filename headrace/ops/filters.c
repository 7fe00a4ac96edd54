/* The floor of each row's logits under min-p, top-k and top-p: filters.py says what it is.
 *
 * Few logits matter. Maxima of tiles bound the k-th largest logit from below (k tiles reach it), so
 * that only tiles above the bound are read again; what is left is bisected on its integer order. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
void *openmp(void) { return (void *)omp_get_max_threads; } /* cbuild asks whose runtime it is */
#else
void *openmp(void) { return NULL; }
static int omp_get_thread_num(void) { return 0; }
#endif
#define TILE 64

static inline float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

/* The order of floats as one of int32, and back; both zeros are one. */
static inline int32_t order(float x) {
    int32_t bits = (int32_t)as_bits(x + 0.0f);
    return bits ^ (bits >> 31 & 0x7fffffff);
}
static inline float unorder(int32_t key) {
    return as_float((uint32_t)(key ^ (key >> 31 & 0x7fffffff)));
}

/* exp of x <= 0, within 2 ulp: 2^k e^r, |r| <= log(2) / 2. Below -87 it is 0. */
static inline float exp_negative(float x) {
    float y = x > -87.0f ? x : -87.0f;
    float k = (y * 1.44269504f + 0x1.8p23f) - 0x1.8p23f; /* rounds to an integer */
    float r = y - k * 0.693359375f + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = (p * r + 8.3334519073e-3f) * r + 4.1665795894e-2f;
    p = (p * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    p = (p * r * r + r) + 1.0f;
    return x > -87.0f ? p * as_float((uint32_t)((int32_t)k + 127) << 23) : 0.0f;
}

/* A tile of logits as fp32, -inf beyond the row's end. */
static inline void load(const char *row, int bf16, int64_t i, int64_t vocab, float *restrict x) {
    int64_t n = vocab - i < TILE ? vocab - i : TILE;
    if (bf16)
        for (int64_t j = 0; j < n; j++)
            x[j] = as_float((uint32_t)((const uint16_t *)row)[i + j] << 16);
    else
        memcpy(x, (const float *)row + i, (size_t)n * sizeof(float));
    for (int64_t j = n; j < TILE; j++) x[j] = -INFINITY;
}

/* Each tile's maximum as a key; returns the row's, or INT32_MAX if it holds a NaN. */
static int32_t maxima(const char *row, int bf16, int64_t vocab, int32_t *restrict tops) {
    int32_t best = INT32_MIN, nan = 0;
    for (int64_t i = 0; i < vocab; i += TILE) {
        float x[TILE];
        int32_t top = INT32_MIN;
        load(row, bf16, i, vocab, x);
        for (int j = 0; j < TILE; j++) {
            nan |= x[j] != x[j];
            top = order(x[j]) > top ? order(x[j]) : top;
        }
        tops[i / TILE] = top;
        best = top > best ? top : best;
    }
    return nan ? INT32_MAX : best;
}

/* Fills the last tile with what is below everything; returns the padded length. */
static int64_t pad(int32_t *key, int64_t n) {
    for (; n % TILE; n++) key[n] = INT32_MIN;
    return n;
}

/* The keys >= cut; tiles below it are not read. Room for vocab + TILE keys. */
static int64_t gather(const char *row, int bf16, int64_t vocab, const int32_t *tops, int32_t cut,
                      int32_t *restrict key) {
    int64_t n = 0;
    for (int64_t i = 0; i < vocab; i += TILE) {
        if (tops[i / TILE] < cut) continue;
        float x[TILE];
        load(row, bf16, i, vocab, x);
        for (int j = 0; j < TILE; j++) key[n] = order(x[j]), n += key[n] >= cut;
    }
    return n;
}

/* The sum of mass over keys >= t. It never grows with t, since each partial sum adds the same terms
 * or zeros in the same order. */
static double weigh(const int32_t *restrict key, const float *restrict mass, int64_t n, int32_t t) {
    double sum[TILE] = {0}, total = 0;
    for (int64_t i = 0; i < n; i += TILE)
        for (int j = 0; j < TILE; j++)
            sum[j] += as_float(as_bits(mass[i + j]) & -(uint32_t)(key[i + j] >= t));
    for (int j = 0; j < TILE; j++) total += sum[j];
    return total;
}

/* The largest t whose weight is >= target; low's must be, and no key may be >= high. */
static int32_t search(const int32_t *key, const float *mass, int64_t n, double target, int32_t low,
                      int32_t high) {
    while ((int64_t)high - low > 1) {
        int32_t middle = (int32_t)(((int64_t)low + high) >> 1);
        if (weigh(key, mass, n, middle) >= target)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The k-th largest of n keys, or low if fewer are >= low. */
static int32_t kth(int32_t *key, float *mass, int64_t n, int64_t k, int32_t low, int32_t high) {
    n = pad(key, n);
    for (int64_t i = 0; i < n; i++) mass[i] = 1.0f;
    return search(key, mass, n, (double)k, low, high);
}

/* The key at which the mass from the top reaches the share p of all. Keys so light that they could
 * not all together fill the rest are left out first: most of a vocabulary. */
static int32_t nucleus(int32_t *key, float *mass, int64_t n, float p, int32_t low, int32_t high) {
    double all = weigh(key, mass, n, low);
    float least = (float)(all * (1 - p) / (2 * (double)n));
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
        key[kept] = key[i], mass[kept] = mass[i];
        kept += mass[i] >= least;
    }
    return search(key, mass, pad(key, kept), all * p, low, high);
}

static float floor_of(const char *row, int bf16, int64_t vocab, float temperature, int64_t k,
                      float top_p, float min_p, int32_t *key, float *mass, int32_t *tops) {
    int32_t top = maxima(row, bf16, vocab, tops), cut = order(-INFINITY) + 1;
    if (top < cut || top >= order(INFINITY)) return -INFINITY;
    if (min_p > 0) {
        int32_t least = order(unorder(top) + temperature * logf(min_p));
        cut = least > top ? top : least > cut ? least : cut;
    }
    if (k > 0 && k < vocab) {
        cut = kth(tops, mass, (vocab + TILE - 1) / TILE, k, cut, top + 1);
        int64_t n = gather(row, bf16, vocab, tops, cut, key);
        cut = kth(key, mass, n, k, cut, top + 1);
    }
    if (top_p < 1) {
        int64_t n = pad(key, gather(row, bf16, vocab, tops, cut, key));
        for (int64_t i = 0; i < n; i++)
            mass[i] = exp_negative((unorder(key[i]) - unorder(top)) / temperature);
        cut = nucleus(key, mass, n, top_p, cut, top + 1);
    }
    return unorder(cut);
}

/* Stride in elements. scratch: 3 * (vocab + TILE) words a thread. Rows colder than `coldest` and
 * rows that ask for nothing get -inf. */
void hr_floors(const char *logits, int bf16, int64_t rows, int64_t vocab, int64_t stride,
               const float *temperature, float coldest, const int32_t *top_k, const float *top_p,
               const float *min_p, float *floors, int32_t *scratch, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        int asks = (top_k[r] > 0 && top_k[r] < vocab) || top_p[r] < 1 || min_p[r] > 0;
        int32_t *key = scratch + omp_get_thread_num() * 3 * (vocab + TILE);
        floors[r] = -INFINITY;
        if (asks && temperature[r] >= coldest)
            floors[r] = floor_of(logits + r * stride * (bf16 ? 2 : 4), bf16, vocab, temperature[r],
                                 top_k[r], top_p[r], min_p[r], key,
                                 (float *)(key + vocab + TILE), key + 2 * (vocab + TILE));
    }
}
