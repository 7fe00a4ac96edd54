/* Attention over paged KV for rows with few queries, and the write of new K and V into their slots.
 * A work item is a row's key range with all heads: a page holds the heads of a token side by side,
 * so memory is read in order and once. Sixteen keys at a time: scores (a tree of shuffles sums 16
 * products at once), online softmax, values, in float32. A row cut in several items is merged last.
 * Vectors are GCC's and Clang's extension, lowered to what the CPU has. No -ffast-math: it switches
 * denormals off for the whole process, and NaN must stay NaN. */
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#define omp_get_max_threads 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16 /* keys a block, elements a vector */
#define MAXQ 4   /* query vectors that share one read of a key in registers */
#define LOW -1e30f
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

#ifdef __clang__
#define SHUF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUF(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

/* An item: keys begin .. end of a row; part: where its result stays, -1: it is the whole row. */
typedef struct { int64_t row, q0, q_len, seq_len; } Row;
typedef struct { int64_t index, begin, end, part; } Item;
typedef struct { int64_t index, part, parts; } Merge;

/* Mirrored field by field in cpu.py. Strides count elements. */
typedef struct {
    void *kv;
    int64_t page_stride, layer_stride, value_stride, token_stride, head_stride;
    const int32_t *table;
    int64_t table_stride, n_rest;
    const int64_t *slots, *rest; /* rest: tokens that are only written, as no row here has them */
    const Row *rows;
    const Item *items;
    const Merge *merges;
    const int64_t *turns; /* items turns[i] .. turns[i + 1] are one thread's turn */
    int64_t n_turns, n_merges;
    float *states; /* one a thread, then one a part */
    int64_t state_size, threads, heads, kv_heads, head_dim, page_tokens, window, bf16;
} Step;
typedef struct { void *data; int64_t token_stride, head_stride; } Heads;

INLINE vf splat(float x) { return (vf){} + x; }
INLINE vf loadf(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void storef(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf choose(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

INLINE vf load(const void *base, int64_t i, int bf16) {
    if (!bf16) return loadf((const float *)base + i);
    vh h;
    memcpy(&h, (const uint16_t *)base + i, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}

/* Into the second cache level: a page of all heads and the next one do not fit the first. */
INLINE void prefetch(const void *base, int64_t i, int bf16) {
    __builtin_prefetch((const char *)base + i * (bf16 ? 2 : 4), 0, 2);
}

INLINE void store(void *base, int64_t i, vf v, int bf16) {
    if (!bf16) { storef((float *)base + i, v); return; }
    vu u = (vu)v, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vi nan = v != v, quiet = (vi)(u >> 16) | 0x40;
    vh h = __builtin_convertvector(((vi)rounded & ~nan) | (quiet & nan), vh);
    memcpy((uint16_t *)base + i, &h, sizeof h);
}

/* e^x for x <= 0, relative error below 2e-7; NaN stays NaN. */
INLINE vf vexp(vf x) {
    x = choose(x < -87.0f, splat(-87.0f), x);
    vf n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    const float c[] = {1.39819995e-3f, 8.33345191e-3f, 4.16657959e-2f, 1.66666655e-1f, 0.5f};
    vf p = splat(1.9875691500e-4f);
    for (int i = 0; i < 5; i++) p = p * r + c[i];
    p = p * r * r + r + 1.0f;
    return p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}

/* Sum of neighbours: a0+a1, a2+a3, .., b0+b1, .. */
INLINE vf pair(vf a, vf b) {
    return SHUF(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           SHUF(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* Lane i of the result is the sum of v[i]. */
INLINE vf sums(vf *v) {
#pragma GCC unroll 4
    for (int width = 8; width > 0; width /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < width; i++) v[i] = pair(v[2 * i], v[2 * i + 1]);
    return v[0];
}

#define FOLD(...) { vf w = SHUF(v, v, __VA_ARGS__); v = choose(v > w, v, w); }
INLINE float maximum(vf v) {
    FOLD(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
    FOLD(4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
    FOLD(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
    return v[0] > v[1] ? v[0] : v[1];
}

INLINE float total(vf v) {
    for (int i = 1; i < LANES; i++) v[0] += v[i];
    return v[0];
}

INLINE int64_t clamp(int64_t x, int64_t most) { return x < 0 ? 0 : x < most ? x : most; }
/* Floats of a query vector's state: scaled query, values, sums of weights by lane, maximum. */
INLINE int64_t width(int64_t d) { return 2 * d + 2 * LANES; }

/* A row's states: by KV head, then by token, then by query head of that KV head. */
INLINE void start(const Step *s, const Row *row, Heads q, float scale, float *state, int bf16) {
    const int64_t d = s->head_dim, group = s->heads / s->kv_heads, per_head = row->q_len * group;
    for (int64_t i = 0; i < s->heads * row->q_len; i++, state += width(d)) {
        int64_t token = row->q0 + i % per_head / group, head = i / per_head * group + i % group;
        int64_t from = token * q.token_stride + head * q.head_stride;
        for (int64_t c = 0; c < d; c += LANES)
            storef(state + c, load(q.data, from + c, bf16) * scale);
        for (int64_t c = d; c <= 2 * d; c += LANES) storef(state + c, splat(0));
        storef(state + 2 * d + LANES, splat(LOW));
    }
}

/* Up to MAXQ query vectors (the first is number q of its KV head) against n <= 16 keys and values
 * from position pos on. ahead: elements to the next keys, fetched meanwhile as pages scatter. */
INLINE void block(const Step *s, float *state, int64_t d, const void *k, const void *v, int n,
                  int64_t pos, int64_t sees, int64_t q, int64_t ahead, int nq, int bf16) {
    const int64_t w = width(d), stride = s->token_stride;
    vf part[MAXQ][LANES]; /* part[m][t]: lanes of query m times key t */
    for (int t = 0; t < n; t++) {
        vf acc[MAXQ] = {};
        for (int64_t c = 0; c < d; c += LANES) {
            if (!bf16 || c % (2 * LANES) == 0) prefetch(k, t * stride + c + ahead, bf16);
            vf key = load(k, t * stride + c, bf16);
            for (int m = 0; m < nq; m++) acc[m] += key * loadf(state + m * w + c);
        }
        for (int m = 0; m < nq; m++) part[m][t] = acc[m];
    }
    for (int t = n; t < LANES; t++)
        for (int m = 0; m < nq; m++) part[m][t] = splat(0);
    float weight[MAXQ][LANES], alpha[MAXQ];
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int m = 0; m < nq; m++) {
        float *sum = state + m * w + 2 * d, *max = sum + LANES;
        vf score = sums(part[m]);
        int64_t end = sees + (q + m) / (s->heads / s->kv_heads) - pos;
        int64_t begin = s->window ? end - s->window : 0;
        vi seen = (lane >= (int)clamp(begin, n)) & (lane < (int)clamp(end, n));
        score = choose(seen, score, splat(LOW));
        float top = maximum(score);
        alpha[m] = 1.0f;
        if (top > *max) alpha[m] = vexp(splat(*max - top))[0], *max = top;
        vf p = choose(seen, vexp(score - *max), splat(0));
        storef(sum, loadf(sum) * alpha[m] + p);
        storef(weight[m], p);
    }
    int64_t c = 0; /* four vectors of values at a time in registers, then what is left */
    for (; c + 4 * LANES <= d; c += 4 * LANES) {
        vf acc[MAXQ][4];
        for (int m = 0; m < nq; m++)
            for (int i = 0; i < 4; i++)
                acc[m][i] = loadf(state + m * w + d + c + i * LANES) * alpha[m];
        for (int t = 0; t < n; t++)
            for (int i = 0; i < 4; i++) {
                if (!bf16 || i % 2 == 0) prefetch(v, t * stride + c + i * LANES + ahead, bf16);
                vf value = load(v, t * stride + c + i * LANES, bf16);
                for (int m = 0; m < nq; m++) acc[m][i] += value * weight[m][t];
            }
        for (int m = 0; m < nq; m++)
            for (int i = 0; i < 4; i++) storef(state + m * w + d + c + i * LANES, acc[m][i]);
    }
    for (; c < d; c += LANES)
        for (int m = 0; m < nq; m++) {
            vf acc = loadf(state + m * w + d + c) * alpha[m];
            for (int t = 0; t < n; t++) acc += load(v, t * stride + c, bf16) * weight[m][t];
            storef(state + m * w + d + c, acc);
        }
}

/* Where a row's position lies in the slab, in elements. */
INLINE int64_t place(const Step *s, const Row *row, int64_t pos, int64_t layer) {
    int64_t page = s->table[row->row * s->table_stride + pos / s->page_tokens];
    return page * s->page_stride + layer * s->layer_stride + pos % s->page_tokens * s->token_stride;
}

/* All keys of an item, page by page; then: the next item, its first page is fetched at the end. */
INLINE void keys(const Step *s, const Item *item, const Item *then, float *state, int64_t layer,
                 int bf16) {
    const Row *row = s->rows + item->index;
    const int64_t d = s->head_dim, group = s->heads / s->kv_heads, queries = row->q_len * group;
    int64_t at = place(s, row, item->begin, layer), next, n, size = bf16 ? 2 : 4;
    for (int64_t pos = item->begin; pos < item->end; pos += n, at = next) {
        n = s->page_tokens - pos % s->page_tokens;
        if (n > LANES) n = LANES;
        if (n > item->end - pos) n = item->end - pos;
        next = pos + n < item->end ? place(s, row, pos + n, layer)
                                   : place(s, s->rows + then->index, then->begin, layer);
        for (int64_t g = 0; g < s->kv_heads; g++) {
            const char *k = (const char *)s->kv + (at + g * s->head_stride) * size;
            const char *v = k + s->value_stride * size;
            for (int64_t m = 0; m < queries; m += MAXQ) {
                float *st = state + (g * queries + m) * width(d);
                int64_t sees = row->seq_len - row->q_len + 1; /* keys the first query sees */
#define BLOCK(D, Q) block(s, st, D, k, v, (int)n, pos, sees, m, next - at, Q, bf16)
#define QUERIES(Q) case Q: if (d == 64) BLOCK(64, Q); else BLOCK(d, Q); break
                switch (queries - m < MAXQ ? queries - m : MAXQ) {
                    QUERIES(1); QUERIES(2); QUERIES(3); QUERIES(4);
                }
            }
        }
    }
}

/* Merges a row's parts (one part: divides by the sum of weights) and writes its output. */
INLINE void finish(const Step *s, const Row *row, const float *state, int64_t parts, void *out,
                   int bf16) {
    const int64_t d = s->head_dim, group = s->heads / s->kv_heads, per_head = row->q_len * group;
    for (int64_t i = 0; i < s->heads * row->q_len; i++, state += width(d)) {
        int64_t token = row->q0 + i % per_head / group, head = i / per_head * group + i % group;
        const float *sums = state + 2 * d;
        float max = LOW, sum = 0;
        for (int64_t p = 0; p < parts * s->state_size; p += s->state_size)
            if (sums[p + LANES] > max) max = sums[p + LANES];
        for (int64_t p = 0; p < parts * s->state_size; p += s->state_size)
            sum += vexp(splat(sums[p + LANES] - max))[0] * total(loadf(sums + p));
        for (int64_t c = 0; c < d; c += LANES) {
            vf acc = splat(0);
            for (int64_t p = 0; p < parts * s->state_size; p += s->state_size)
                acc += vexp(splat(sums[p + LANES] - max)) * loadf(state + p + d + c);
            store(out, (token * s->heads + head) * d + c, acc / sum, bf16);
        }
    }
}

INLINE void write_slot(const Step *s, int64_t token, Heads k, Heads v, int64_t layer, int bf16) {
    const int64_t slot = s->slots[token], size = bf16 ? 2 : 4, bytes = s->head_dim * size;
    if (slot < 0) return;
    for (int64_t g = 0; g < s->kv_heads; g++) {
        int64_t at = slot / s->page_tokens * s->page_stride + layer * s->layer_stride;
        at += slot % s->page_tokens * s->token_stride + g * s->head_stride;
        char *to = (char *)s->kv + at * size;
        memcpy(to, (char *)k.data + (token * k.token_stride + g * k.head_stride) * size, bytes);
        to += s->value_stride * size;
        memcpy(to, (char *)v.data + (token * v.token_stride + g * v.head_stride) * size, bytes);
    }
}

/* Writes the new tokens of the item's own key range: no thread waits for another's writes. */
INLINE void write_item(const Step *s, const Item *item, Heads k, Heads v, int64_t layer, int bf16) {
    const Row *row = s->rows + item->index;
    const int64_t first = row->seq_len - row->q_len;
    for (int64_t pos = item->begin > first ? item->begin : first; pos < item->end; pos++)
        write_slot(s, row->q0 + pos - first, k, v, layer, bf16);
}

INLINE void in_thread(const Step *s, Heads q, Heads k, Heads v, void *out, int64_t layer,
                      float scale, int bf16) {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < s->n_rest; i++) write_slot(s, s->rest[i], k, v, layer, bf16);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t r = 0; r < s->n_turns; r++)
        for (int64_t i = s->turns[r]; i < s->turns[r + 1]; i++) {
            const Item *item = s->items + i, *then = i + 1 < s->turns[r + 1] ? item + 1 : item;
            const Row *row = s->rows + item->index;
            int64_t place = item->part < 0 ? omp_get_thread_num() : s->threads + item->part;
            float *state = s->states + place * s->state_size;
            write_item(s, item, k, v, layer, bf16);
            start(s, row, q, scale, state, bf16);
            keys(s, item, then, state, layer, bf16);
            if (item->part < 0) finish(s, row, state, 1, out, bf16);
        }
    if (s->n_merges == 0) return;
#pragma omp barrier
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < s->n_merges; i++) {
        const Merge *m = s->merges + i;
        const float *first = s->states + (s->threads + m->part) * s->state_size;
        finish(s, s->rows + m->index, first, m->parts, out, bf16);
    }
}

void attend(const Step *s, Heads q, Heads k, Heads v, void *out, int64_t layer, float scale) {
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    if (s->bf16) in_thread(s, q, k, v, out, layer, scale, 1);
    else in_thread(s, q, k, v, out, layer, scale, 0);
}

/* Tells which OpenMP runtime this library is bound to; NULL: built without threads. */
void *openmp(void) { return (void *)omp_get_max_threads; }
