/* Causal attention and its gradient, in float32 on a CPU, for the last `queries` of `keys` tokens:

       y_i = sum_{j <= i} P_ij v_j,    P_ij = exp(q_i . k_j - m_i) / l_i

   with m_i the peak of a query's scores and l_i their sum. A block of queries walks over blocks of keys, as in FlashAttention
   (arXiv 2205.14135): no more than a block of scores exists, and keys later than a block's last query are not looked at.

   Scores lie transposed, keys below each other and queries side by side in the lanes, in panels of WIDE queries. So peaks and sums
   of a softmax run down the rows, without a step across lanes, and keys and values are read number by number where they are, with
   whatever strides and widths. Only queries are transposed, once per block.

   The backward pass computes P again from m and l. With dP_ij = dy_i . v_j and D_i = dy_i . y_i:

       dS = P (dP - D),    dq_i = sum_j dS_ij k_j,    dk_j = sum_i dS_ij q_i,    dv_j = sum_i P_ij dy_i

   A unit of work is a block of queries, or, backward, every `parts`-th block of one query-key pair, which sums up gradients of keys
   and values of its own; `parts` depends on shapes alone and they are added in order: any number of workers gives the same. */

#include "vectors.h"

#define BLOCK 64 /* queries */
#define PANELS (BLOCK / WIDE)
#define KEYS 64
_Static_assert(BLOCK % WIDE == 0 && WIDE % 4 == 0, "a block is whole panels, and these are transposed in fours");
#define LOG2E 1.4426950408889634f
#define LOWEST -3.4028235e38f

typedef quad unaligned_quad __attribute__((aligned(4)));

typedef struct { /* (batch, pair, time, and contiguous), strides in elements */
    float *data;
    int64_t batch, pair, time;
} view;

typedef struct { /* mirrored in attention_native.py; those marked ? may be NULL */
    int64_t batch, pairs, queries, keys, width, value, parts; /* width: of queries and keys; value: that of values */
    view q, k, v, y, dy, dq /*?*/, dk /*?*/, dv /*?*/;        /* dq and dk are there both or not at all */
    view dks, dvs;                                            /* (parts * b, pairs, keys, .), to be summed over parts */
    const uint8_t *exists /*?*/;                              /* (b, keys) */
    float *softmax /*?*/;                                     /* (b, pairs, queries, 2): m in units of ln 2, and 1 / l */
    int64_t *done;                                            /* (b, pairs), 0 at first, like what follows */
    int64_t next, failed;                                     /* the counter; whether a worker had no memory */
} attention;

typedef struct { /* of a unit of work, and the space that a worker has. T: (numbers of a row, WIDE queries) for every panel */
    int64_t b, pair, part, start, count, key, keys; /* queries from `start`; keys from `key` */
    const float *k, *v;
    const uint8_t *exists;
    float *space;
    int64_t used, w, d;             /* numbers of space; widths of keys and values in whole vectors */
    float *qT, *out, *scores, *dyT, *dqT, *dscores; /* scores: (panels, KEYS, WIDE) */
    float *q, *dy, *dk, *dv;        /* queries in panels (., BLOCK, WIDE); gradients of all keys, rows of w and d numbers */
    float *peak, *total, *dot;      /* BLOCK: m; l, or 1 / l backward; D */
} unit;

/* ---- products ---- */

enum { SET, ADD, SCALE }; /* what happens to what was there: nothing of it stays, all of it does, it is scaled lane by lane */

INLINE void product(const int rows, const int cols, const int mode, float *out, int64_t step, const vec *scale, const float *left,
                    int64_t by_m, int64_t by_k, const float *right, int64_t count) {
    vec sum[ROWS][COLS] = {{{0}}};
    multiply(rows, cols, sum, left, by_m, by_k, right, count);
    for (int m = 0; m < rows; m++)
        for (int c = 0; c < cols; c++) {
            vec *to = (vec *)(out + m * step) + c;
            *to = mode == SET ? sum[m][c] : mode == ADD ? *to + sum[m][c] : *to * scale[c] + sum[m][c];
        }
}

/* Of `n` values of m. What goes into a sum is added up by itself first: rounding then grows with the number of blocks. */
INLINE void products(const int cols, const int mode, float *out, int64_t step, const vec *scale, int64_t n, const float *left,
                     int64_t by_m, int64_t by_k, const float *right, int64_t count) {
    int64_t m = 0;
#define TAKE(rows) product(rows, cols, mode, out + m * step, step, scale, left + m * by_m, by_m, by_k, right, count), m += rows
    while (m + ROWS <= n) TAKE(ROWS);
    if (ROWS > 8 && m + 8 <= n) TAKE(8 < ROWS ? 8 : ROWS);
    if (ROWS > 4 && m + 4 <= n) TAKE(4 < ROWS ? 4 : ROWS);
    if (ROWS > 2 && m + 2 <= n) TAKE(2 < ROWS ? 2 : ROWS);
    if (m < n) TAKE(1);
#undef TAKE
}

/* to = rows of `rows` (n) . right (numbers, WIDE) */
static void dots(float *to, const float *rows, int64_t stride, int64_t n, const float *right, int64_t numbers) {
    products(COLS, SET, to, WIDE, 0, n, rows, stride, 1, right, numbers);
}

/* to (numbers, WIDE) = scale to + sum_j rows_j weights_j */
static void weighted(float *to, const vec *scale, const float *rows, int64_t stride, int64_t numbers, const float *weights,
                     int64_t n) {
    products(COLS, SCALE, to, WIDE, scale, numbers, rows, 1, stride, weights, n);
}

static void add_weighted(float *to, const float *rows, int64_t stride, int64_t numbers, const float *weights, int64_t n) {
    products(COLS, ADD, to, WIDE, 0, numbers, rows, 1, stride, weights, n);
}

/* to_j += sum_i weights_ji rows_i for n rows of `columns` numbers; weights (n, WIDE queries), rows in panels of columns */
static void scatter(float *to, int64_t columns, int64_t n, const float *weights, const float *rows) {
    int64_t c = 0;
    for (; c + WIDE <= columns; c += WIDE)
        products(COLS, ADD, to + c, columns, 0, n, weights, WIDE, 1, rows + c * BLOCK, WIDE);
    if (c < columns) products(1, ADD, to + c, columns, 0, n, weights, WIDE, 1, rows + c * BLOCK, WIDE);
}

/* ---- to and from memory ---- */

/* `rows` rows of `columns` numbers, times `factor`, into the columns of a panel; zeros for the others */
static void load_columns(float *to, const float *from, int64_t stride, int64_t rows, int64_t columns, float factor) {
    for (int64_t i = 0; i < WIDE; i += 4) {
        int64_t c = 0;
        for (; i + 4 <= rows && c + 4 <= columns; c += 4) {
            quad x[4];
            for (int k = 0; k < 4; k++) x[k] = *(const unaligned_quad *)(from + (i + k) * stride + c) * factor;
            transpose4x4(x);
            for (int k = 0; k < 4; k++) *(quad *)(to + (c + k) * WIDE + i) = x[k];
        }
        for (; c < columns; c++)
            for (int64_t k = i; k < i + 4; k++) to[c * WIDE + k] = k < rows ? from[k * stride + c] * factor : 0;
    }
}

static void store_columns(float *to, const float *from, int64_t stride, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i += 4) {
        int64_t c = 0;
        for (; i + 4 <= rows && c + 4 <= columns; c += 4) {
            quad x[4];
            for (int k = 0; k < 4; k++) x[k] = *(const quad *)(from + (c + k) * WIDE + i);
            transpose4x4(x);
            for (int k = 0; k < 4; k++) *(unaligned_quad *)(to + (i + k) * stride + c) = x[k];
        }
        for (; c < columns; c++)
            for (int64_t k = i; k < min_i64(i + 4, rows); k++) to[k * stride + c] = from[c * WIDE + k];
    }
}

/* `rows` rows into panels (columns / WIDE, BLOCK, WIDE); zeros elsewhere */
static void load_rows(float *to, const float *from, int64_t stride, int64_t rows, int64_t columns) {
    for (int64_t c = 0; c < columns; c += WIDE)
        for (int64_t i = 0; i < BLOCK; i++, to += WIDE) {
            memset(to, 0, WIDE * sizeof(float));
            if (i < rows) memcpy(to, from + i * stride + c, min_i64(WIDE, columns - c) * sizeof(float));
        }
}

static float *place(const view *v, int64_t b, int64_t pair, int64_t t) {
    return v->data + b * v->batch + pair * v->pair + t * v->time;
}

/* ---- a block of queries ---- */

/* How many of the block of keys the queries of a panel may attend to at most. */
static int64_t seen(const attention *s, const unit *u, int64_t panel) {
    int64_t last = u->start + min_i64((panel + 1) * WIDE, u->count) - 1 + s->keys - s->queries;
    int64_t n = last + 1 - u->key;
    return n < 0 ? 0 : min_i64(n, u->keys);
}

/* The scores of a panel, in units of ln 2, -infinity where a query may not attend. */
static void panel_scores(const attention *s, const unit *u, int64_t panel, int64_t n) {
    float *scores = u->scores + panel * KEYS * WIDE;
    dots(scores, u->k + u->key * s->k.time, s->k.time, n, u->qT + panel * s->width * WIDE, s->width);
    int64_t first = u->start + panel * WIDE + s->keys - s->queries - u->key; /* the last key that all of the queries see */
    ivec order[COLS];
    for (int i = 0; i < WIDE; i++) order[i / LANES][i % LANES] = i;
    for (int64_t j = first < 0 ? 0 : first + 1; j < n; j++)
        for (int c = 0; c < COLS; c++) {
            vec *at = (vec *)(scores + j * WIDE) + c;
            *at = chosen(order[c] < (ivec){0} + (int32_t)(j - first), all(-__builtin_inff()), *at);
        }
    for (int64_t j = 0; u->exists && j < n; j++)
        if (!u->exists[u->key + j])
            for (int c = 0; c < COLS; c++) ((vec *)(scores + j * WIDE))[c] = all(-__builtin_inff());
}

/* One more block of keys. */
static void attend(const attention *s, const unit *u, int64_t panel, int64_t n) {
    vec *scores = (vec *)(u->scores + panel * KEYS * WIDE), *peak = (vec *)(u->peak + panel * WIDE);
    vec *total = (vec *)(u->total + panel * WIDE), fade[COLS];
    panel_scores(s, u, panel, n);
    for (int c = 0; c < COLS; c++) {
        vec top = peak[c], sum = {0};
        for (int64_t j = 0; j < n; j++) top = chosen(scores[j * COLS + c] > top, scores[j * COLS + c], top);
        for (int64_t j = 0; j < n; j++) sum += scores[j * COLS + c] = exp2_vec(scores[j * COLS + c] - top);
        fade[c] = exp2_vec(peak[c] - top);
        total[c] = total[c] * fade[c] + sum;
        peak[c] = top;
    }
    weighted(u->out + panel * s->value * WIDE, fade, u->v + u->key * s->v.time, s->v.time, s->value, (float *)scores, n);
}

/* Sets the first block of keys that a row has at all, and asks for the others: whether there is one. */
static int next_keys(const attention *s, unit *u) {
    int64_t end = min_i64(s->keys, u->start + u->count + s->keys - s->queries);
    u->key += u->keys;
    while (u->exists && u->key < end && !u->exists[u->key]) u->key++; /* padding on the left costs nothing */
    u->keys = min_i64(KEYS, end - u->key);
    return u->key < end;
}

static void take_queries(const attention *s, unit *u, int64_t block) {
    u->start = block * BLOCK, u->count = min_i64(BLOCK, s->queries - u->start), u->key = u->keys = 0;
    for (int64_t p = 0; p * WIDE < u->count; p++) {
        const float *q = place(&s->q, u->b, u->pair, u->start + p * WIDE);
        load_columns(u->qT + p * s->width * WIDE, q, s->q.time, min_i64(WIDE, u->count - p * WIDE), s->width, LOG2E);
    }
}

static void take_pair(const attention *s, unit *u, int64_t i) {
    u->b = i / s->pairs, u->pair = i % s->pairs;
    u->k = place(&s->k, u->b, u->pair, 0), u->v = place(&s->v, u->b, u->pair, 0);
    u->exists = s->exists ? s->exists + u->b * s->keys : 0;
}

static void forward_unit(const attention *s, unit *u, int64_t i) {
    const int64_t blocks = (s->queries + BLOCK - 1) / BLOCK;
    take_pair(s, u, i / blocks);
    take_queries(s, u, blocks - 1 - i % blocks); /* those with most keys first */
    memset(u->out, 0, PANELS * s->value * WIDE * sizeof(float));
    for (int64_t k = 0; k < BLOCK; k++) u->peak[k] = LOWEST, u->total[k] = 0;
    while (next_keys(s, u))
        for (int64_t p = 0; p * WIDE < u->count; p++) {
            int64_t n = seen(s, u, p);
            if (n) attend(s, u, p, n);
        }
    float *softmax = s->softmax ? s->softmax + 2 * ((u->b * s->pairs + u->pair) * s->queries + u->start) : 0;
    for (int64_t k = 0; k < BLOCK; k++) {
        u->total[k] = u->total[k] == 0 ? 0 : 1 / u->total[k]; /* a query that may attend to nothing gives 0 */
        if (softmax && k < u->count) softmax[2 * k] = u->peak[k], softmax[2 * k + 1] = u->total[k];
    }
    for (int64_t p = 0; p * WIDE < u->count; p++) {
        vec *out = (vec *)(u->out + p * s->value * WIDE);
        const vec *share = (const vec *)(u->total + p * WIDE);
        for (int64_t k = 0; k < s->value * COLS; k++) out[k] *= share[k % COLS];
        float *y = place(&s->y, u->b, u->pair, u->start + p * WIDE);
        store_columns(y, (float *)out, s->y.time, min_i64(WIDE, u->count - p * WIDE), s->value);
    }
}

/* ---- backward ---- */

/* What the gradients of a block of queries need beside its scores. */
static void take_gradients(const attention *s, unit *u) {
    const float *dy = place(&s->dy, u->b, u->pair, u->start), *y = place(&s->y, u->b, u->pair, u->start);
    const float *softmax = s->softmax + 2 * ((u->b * s->pairs + u->pair) * s->queries + u->start);
    for (int64_t i = 0; i < BLOCK; i++) {
        u->peak[i] = i < u->count ? softmax[2 * i] : 0, u->total[i] = i < u->count ? softmax[2 * i + 1] : 0;
        vec sum = {0};
        for (int64_t c = 0; i < u->count && c < s->value; c += LANES)
            sum += get(dy + i * s->dy.time + c, s->value - c) * get(y + i * s->y.time + c, s->value - c);
        u->dot[i] = lane_sum(sum);
    }
    if (s->dv.data) load_rows(u->dy, dy, s->dy.time, u->count, s->value);
    if (!s->dq.data) return;
    load_rows(u->q, place(&s->q, u->b, u->pair, u->start), s->q.time, u->count, s->width);
    for (int64_t p = 0; p * WIDE < u->count; p++)
        load_columns(u->dyT + p * s->value * WIDE, dy + p * WIDE * s->dy.time, s->dy.time, min_i64(WIDE, u->count - p * WIDE),
                     s->value, 1);
    memset(u->dqT, 0, PANELS * s->width * WIDE * sizeof(float));
}

/* One more block of keys. */
static void reverse(const attention *s, const unit *u, int64_t panel, int64_t n) {
    vec *scores = (vec *)(u->scores + panel * KEYS * WIDE), *dscores = (vec *)(u->dscores + panel * KEYS * WIDE);
    const vec *peak = (vec *)(u->peak + panel * WIDE), *share = (vec *)(u->total + panel * WIDE);
    const vec *dot = (vec *)(u->dot + panel * WIDE);
    panel_scores(s, u, panel, n);
    for (int64_t k = 0; k < n * COLS; k++) scores[k] = exp2_vec(scores[k] - peak[k % COLS]) * share[k % COLS];
    if (s->dv.data)
        scatter(u->dv + u->key * u->d, u->d, n, (float *)scores, u->dy + panel * WIDE * WIDE);
    if (!s->dq.data) return;
    dots((float *)dscores, u->v + u->key * s->v.time, s->v.time, n, u->dyT + panel * s->value * WIDE, s->value);
    for (int64_t k = 0; k < n * COLS; k++) dscores[k] = scores[k] * (dscores[k] - dot[k % COLS]);
    add_weighted(u->dqT + panel * s->width * WIDE, u->k + u->key * s->k.time, s->k.time, s->width, (float *)dscores, n);
    scatter(u->dk + u->key * u->w, u->w, n, (float *)dscores, u->q + panel * WIDE * WIDE);
}

static void store_keys(const attention *s, const unit *u, const view *to, const float *from, int64_t step, int64_t columns) {
    for (int64_t j = 0; j < s->keys; j++)
        memcpy(place(to, u->part * s->batch + u->b, u->pair, j), from + j * step, columns * sizeof(float));
}

static void sum_parts(const attention *s, const unit *u, const view *to, const view *parts, int64_t columns) {
    for (int64_t j = 0; j < s->keys; j++)
        for (int64_t c = 0; c < columns; c += LANES) {
            vec sum = {0};
            for (int64_t part = 0; part < s->parts; part++)
                sum += get(place(parts, part * s->batch + u->b, u->pair, j) + c, columns - c);
            put(place(to, u->b, u->pair, j) + c, sum, columns - c);
        }
}

static void backward_unit(const attention *s, unit *u, int64_t i) {
    take_pair(s, u, i / s->parts);
    u->part = i % s->parts;
    if (s->dq.data) memset(u->dk, 0, s->keys * u->w * sizeof(float));
    if (s->dv.data) memset(u->dv, 0, s->keys * u->d * sizeof(float));
    for (int64_t block = u->part; block * BLOCK < s->queries; block += s->parts) {
        take_queries(s, u, block);
        take_gradients(s, u);
        while (next_keys(s, u))
            for (int64_t p = 0; p * WIDE < u->count; p++) {
                int64_t n = seen(s, u, p);
                if (n) reverse(s, u, p, n);
            }
        for (int64_t p = 0; s->dq.data && p * WIDE < u->count; p++)
            store_columns(place(&s->dq, u->b, u->pair, u->start + p * WIDE), u->dqT + p * s->width * WIDE, s->dq.time,
                          min_i64(WIDE, u->count - p * WIDE), s->width);
    }
    if (s->dq.data) store_keys(s, u, &s->dks, u->dk, u->w, s->width);
    if (s->dv.data) store_keys(s, u, &s->dvs, u->dv, u->d, s->value);
    if (s->parts == 1 || __atomic_add_fetch(&s->done[u->b * s->pairs + u->pair], 1, __ATOMIC_ACQ_REL) < s->parts) return;
    if (s->dq.data) sum_parts(s, u, &s->dk, &s->dks, s->width); /* by the worker that ends last, but in the order of the parts */
    if (s->dv.data) sum_parts(s, u, &s->dv, &s->dvs, s->value);
}

/* ---- workers ---- */

static float *space(unit *u, int64_t floats) {
    int64_t start = u->used;
    u->used += round_up(floats, 16);
    return u->space ? u->space + start : 0;
}

static void carve_workspace(const attention *s, unit *u, int backward) {
    u->w = round_up(s->width, LANES), u->d = round_up(s->value, LANES);
    u->qT = space(u, BLOCK * s->width), u->scores = space(u, BLOCK * KEYS);
    u->peak = space(u, BLOCK), u->total = space(u, BLOCK), u->dot = space(u, BLOCK);
    if (!backward) {
        u->out = space(u, BLOCK * s->value);
        return;
    }
    if (s->dv.data) u->dy = space(u, BLOCK * round_up(s->value, WIDE)), u->dv = space(u, s->keys * u->d);
    if (!s->dq.data) return;
    u->q = space(u, BLOCK * round_up(s->width, WIDE)), u->dk = space(u, s->keys * u->w);
    u->dyT = space(u, BLOCK * s->value), u->dqT = space(u, BLOCK * s->width), u->dscores = space(u, BLOCK * KEYS);
}

/* Takes units until none is left. */
static void work(attention *s, int backward) {
    unit u = {0};
    void *memory = 0;
    carve_workspace(s, &u, backward); /* without space: how much it takes */
    if (posix_memalign(&memory, 64, u.used * sizeof(float))) {
        s->failed = 1;
        return;
    }
    u.space = memory, u.used = 0;
    carve_workspace(s, &u, backward);
    const int64_t units = s->batch * s->pairs * (backward ? s->parts : (s->queries + BLOCK - 1) / BLOCK);
    status before = flush();
    for (int64_t i; (i = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED)) < units;)
        (backward ? backward_unit : forward_unit)(s, &u, i);
    restore(before);
    free(memory);
}

void attend_forward(attention *s) { work(s, 0); }
void attend_backward(attention *s) { work(s, 1); }
