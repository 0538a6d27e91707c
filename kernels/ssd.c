/* The SSD scan of Mamba-2 (arXiv 2405.21060, section 6), its gradient and its single step, in float32 on a CPU.

   Within a chunk of Q tokens, with a_i the sum of A dt up to token i, S the state that enters, per head:

       y_i = sum_{j<=i} M_ij x_j + exp(a_i) S C_i,    M_ij = exp(a_i - a_j) (C_i . B_j) dt_j + [i = j] D
       S'  = exp(a_Q) S + sum_j exp(a_Q - a_j) dt_j x_j B_j^T

   A unit of work is some heads of one group in one sequence: it walks over the chunks with its states in the second-level cache
   and forms C B^T once for all its heads. Threads take units from a shared counter. Heads meet only where gradients of B and C
   are summed, in the order of the units, so the result is the same for any number of workers.

   Every matrix lies in panels of WIDE columns, each contiguous and padded with zeros, and every product is made of blocks of
   ROWS x WIDE numbers that stay in registers. The right factor is read as vectors, the left one number by number, so that this
   one may be transposed at no cost. The state is kept as (n, p); T marks what is transposed. */

#include "vectors.h"

#define Q 32
#define KEEP 4 /* of so many chunks, one's entering state is kept for the backward pass */
#define DOT 8 /* sums of a dot product, side by side */
#define SIDE (ROWS > LANES ? ROWS : LANES) /* of the squares of a triangle, whose diagonal ones are written whole */
#define FOURS (ROWS > 4 ? ROWS : 4)        /* rows of a state come in whole blocks, and are transposed in fours */
_Static_assert(WIDE % ROWS == 0, "a block's rows, as columns of the left factor, lie in one panel");
_Static_assert(WIDE % SIDE == 0 && Q % WIDE == 0, "a chunk is whole panels, and these whole squares");
_Static_assert(FOURS % ROWS == 0 && FOURS * COLS % DOT == 0, "a state is whole blocks, and whole steps of its dot product");
#define LOG2E 1.4426950408889634
#define ALIGNED __attribute__((aligned(64)))

typedef struct { /* (batch, time, head or group, and contiguous), strides in elements */
    float *data;
    int64_t batch, time, head;
} view;

typedef struct { /* mirrored in ssd_native.py. What is no view is contiguous; those marked ? may be NULL */
    int64_t batch, length, heads, width, groups, size, parts; /* parts: units of work that a group's heads make */
    view x, dt, B, C, y;
    const float *A, *D /*?*/, *initial /*?*/; /* (h), (h), (b, h, p, n) */
    float *final, *kept /*?*/;                /* (b, h, p, n); see kept_floats */
    view dy, dx, ddt, dB, dC, dBs, dCs;       /* dBs, dCs: (parts * b, t, g, n), to be summed over parts */
    const float *dfinal /*?*/;                /* (b, h, p, n) */
    float *dinitial;                          /* (b, h, p, n) */
    double *dA, *dD;                          /* (b, h), 0 at first like what follows */
    int64_t *done;                            /* (b, g), parts */
    int64_t next, failed;                     /* the counter; whether a worker had no memory */
} scan;

typedef struct { /* in panels: (columns / WIDE, rows, WIDE) */
    float *at;
    int64_t rows;
} matrix;

typedef struct { /* of a unit of work, and the space that a worker has */
    int64_t part, b, group, first, heads, chunks, n, p; /* n, p: padded */
    float *space;
    int64_t used; /* numbers of it */
    matrix B, C, BT, CT, scores, mixing, x, weighted, out, dy, xT, dyT, dmixing, dscores, dBT, dCT;
    float *states, *dstates; /* heads matrices (n, p) each; states: of KEEP chunks */
} unit;

typedef struct { /* of one head in one chunk */
    float dt[Q] ALIGNED, high[Q] ALIGNED, low[Q] ALIGNED; /* high + low: a in units of ln 2 */
    float entering[Q] ALIGNED, leaving[Q] ALIGNED, weight[Q] ALIGNED, through, A, D;
} decays;

INLINE vec *at(matrix m, int64_t row, int64_t panel) { return (vec *)(m.at + (panel * m.rows + row) * WIDE); }
INLINE float *number(matrix m, int64_t row, int64_t column) {
    return m.at + (column / WIDE * m.rows + row) * WIDE + column % WIDE;
}

/* ---- products: out[m] += sum_k left[m, k] right[k] for ROWS values of m and one panel ---- */

/* left transposed: its columns are m, its rows k from 0 to `end` */
INLINE void down(vec out[ROWS][COLS], matrix left, int64_t m, matrix right, int64_t panel, int64_t end) {
    multiply(ROWS, COLS, out, number(left, 0, m), 1, WIDE, (float *)at(right, 0, panel), end);
}

/* its rows are m, its columns k from `start` to `end` */
INLINE void along(vec out[ROWS][COLS], matrix left, int64_t m, matrix right, int64_t panel, int64_t start, int64_t end) {
    for (int64_t k = start, stop; k < end; k = stop) {
        stop = min_i64(end, (k / WIDE + 1) * WIDE);
        multiply(ROWS, COLS, out, number(left, m, k), WIDE, 1, (float *)at(right, k, panel), stop - k);
    }
}

INLINE void put_block(matrix m, int64_t row, int64_t panel, vec block[ROWS][COLS]) {
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLS; c++) at(m, row, panel)[r * COLS + c] = block[r][c];
}

/* out = keep out + left^T right; left (k, m), right (k, .) */
static void update(matrix out, float keep, matrix left, matrix right, int64_t columns, int64_t count) {
    for (int64_t panel = 0; panel < columns / WIDE; panel++)
        for (int64_t m = 0; m < out.rows; m += ROWS) {
            vec block[ROWS][COLS];
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < COLS; c++) block[r][c] = keep * at(out, m, panel)[r * COLS + c];
            down(block, left, m, right, panel, count);
            put_block(out, m, panel, block);
        }
}

/* The lower triangle, out_ji for i >= j: left (k, j), right (k, i). Some of the rest is written, too. */
static void triangle(matrix out, matrix left, matrix right, int64_t count, int64_t tokens) {
    for (int64_t panel = 0; panel < Q / WIDE; panel++)
        for (int64_t m = 0; m < min_i64(tokens, (panel + 1) * WIDE); m += ROWS) {
            vec block[ROWS][COLS] = {{{0}}};
            down(block, left, m, right, panel, count);
            put_block(out, m, panel, block);
        }
}

/* out_i = scale_i (left^T state)_i + sum_{j<=i} mixing_ji right_j, or with `back` mixing_ij and j >= i; left (n, q) */
INLINE void tokens_out(matrix out, const float *scale, matrix left, matrix state, int64_t n, matrix mixing, matrix right,
                       int64_t columns, int64_t tokens, int back) {
    for (int64_t panel = 0; panel < columns / WIDE; panel++)
        for (int64_t m = 0; m < tokens; m += ROWS) {
            vec block[ROWS][COLS] = {{{0}}};
            down(block, left, m, state, panel, n);
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < COLS; c++) block[r][c] *= scale[m + r];
            if (back) along(block, mixing, m, right, panel, m, tokens);
            else down(block, mixing, m, right, panel, min_i64(m + ROWS, tokens));
            put_block(out, m, panel, block);
        }
}

/* Of v_i = sum_p state[n, p] vT[p, i]: out_ni += scale_i v_ni; returns in sums the products with `with`, sum_n with_ni v_ni */
static void gather(matrix out, float *sums, const float *scale, matrix with, matrix state, matrix vT, int64_t p) {
    for (int64_t panel = 0; panel < Q / WIDE; panel++) {
        const vec *factor = (const vec *)scale + panel * COLS;
        vec sum[ROWS][COLS] = {{{0}}};
        for (int64_t m = 0; m < out.rows; m += ROWS) {
            vec block[ROWS][COLS] = {{{0}}};
            along(block, state, m, vT, panel, 0, p);
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < COLS; c++) {
                    at(out, m, panel)[r * COLS + c] += factor[c] * block[r][c];
                    sum[r][c] += at(with, m, panel)[r * COLS + c] * block[r][c];
                }
        }
        for (int c = 0; c < COLS; c++) {
            vec whole = sum[0][c];
            for (int r = 1; r < ROWS; r++) whole += sum[r][c];
            ((vec *)sums)[panel * COLS + c] = whole;
        }
    }
}

/* ---- to and from memory ---- */

/* Q tokens of one head or group; zeros from `tokens` on. What follows in memory, the next head's, is asked for in advance: a row
   of one head is too short for the processor to see where this leads. */
static void load(matrix m, const view *v, int64_t b, int64_t t, int64_t head, int64_t tokens, int64_t columns) {
    const float *from = v->data + b * v->batch + t * v->time + head * v->head;
    for (int64_t c = 0; c < columns; c += WIDE)
        for (int64_t i = 0; i < Q; i++) {
            float *to = (float *)at(m, i, c / WIDE);
            __builtin_prefetch(from + i * v->time + c + columns);
            if (i >= tokens) memset(to, 0, WIDE * sizeof(float));
            else if (columns - c >= WIDE)
                for (int k = 0; k < COLS; k++) ((vec *)to)[k] = ((const unaligned_vec *)(from + i * v->time + c))[k];
            else memset(to, 0, WIDE * sizeof(float)), memcpy(to, from + i * v->time + c, (columns - c) * sizeof(float));
        }
}

static void store(matrix m, const view *v, int64_t b, int64_t t, int64_t head, int64_t tokens, int64_t columns) {
    float *to = v->data + b * v->batch + t * v->time + head * v->head;
    for (int64_t c = 0; c < columns; c += WIDE)
        for (int64_t i = 0; i < tokens; i++) {
            const vec *from = at(m, i, c / WIDE);
            if (columns - c >= WIDE)
                for (int k = 0; k < COLS; k++) ((unaligned_vec *)(to + i * v->time + c))[k] = from[k];
            else memcpy(to + i * v->time + c, from, (columns - c) * sizeof(float));
        }
}

/* `rows` rows of `from`, a multiple of 4; the columns in fours, too, so that some of the padding moves along */
static void transpose(matrix to, matrix from, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r += 4)
        for (int64_t c = 0; c < columns; c += 4) {
            quad x[4];
            for (int k = 0; k < 4; k++) x[k] = *(quad *)number(from, r + k, c);
            transpose4x4(x);
            for (int k = 0; k < 4; k++) *(quad *)number(to, c + k, r) = x[k];
        }
}

/* (p, n) in memory; nothing there: zeros */
static void load_state(matrix m, const float *from, int64_t p, int64_t n, int64_t columns) {
    memset(m.at, 0, m.rows * columns * sizeof(float));
    for (int64_t i = 0; from && i < p; i++)
        for (int64_t j = 0; j < n; j++) *number(m, j, i) = from[i * n + j];
}

static void store_state(matrix m, float *to, int64_t p, int64_t n) {
    for (int64_t i = 0; i < p; i++)
        for (int64_t j = 0; j < n; j++) to[i * n + j] = *number(m, j, i);
}

/* ---- one chunk ---- */

/* Returns 0 where there is no unit left. */
static int take(scan *s, unit *w) {
    int64_t per_group = s->heads / s->groups, parts = s->parts;
    int64_t i = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
    if (i >= s->batch * s->groups * parts) return 0;
    w->part = i % parts, w->group = i / parts % s->groups, w->b = i / parts / s->groups;
    w->first = w->group * per_group + w->part * per_group / parts;
    w->heads = w->group * per_group + (w->part + 1) * per_group / parts - w->first;
    return 1;
}

static void load_group(const scan *s, const unit *w, int64_t t, int64_t tokens) {
    load(w->B, &s->B, w->b, t, w->group, tokens, s->size);
    load(w->C, &s->C, w->b, t, w->group, tokens, s->size);
    transpose(w->BT, w->B, Q, s->size);
    transpose(w->CT, w->C, Q, s->size);
    triangle(w->scores, w->BT, w->CT, s->size, tokens); /* T: (j, i) */
}

/* Sums in float64, and differences of them with both halves: where a token forgets everything the sum is large, and rounded to
   float32 it would spoil the decays between the tokens after it. */
static void load_decays(decays *d, const scan *s, const unit *w, int64_t head, int64_t t, int64_t tokens) {
    const float *dt = s->dt.data + w->b * s->dt.batch + t * s->dt.time + head * s->dt.head;
    double a[Q], sum = 0;
    d->A = s->A[head], d->D = s->D ? s->D[head] : 0;
    for (int64_t i = 0; i < Q; i++) {
        d->dt[i] = i < tokens ? dt[i * s->dt.time] : 0;
        a[i] = sum += (double)d->dt[i] * d->A * LOG2E;
    }
    for (int i = 0; i < Q; i++) d->high[i] = a[i], d->low[i] = a[i] - d->high[i], d->leaving[i] = sum - a[i];
    for (int i = 0; i < Q; i += LANES) {
        *(vec *)(d->entering + i) = exp2_vec(*(vec *)(d->high + i));
        *(vec *)(d->leaving + i) = exp2_vec(*(vec *)(d->leaving + i));
        *(vec *)(d->weight + i) = *(vec *)(d->leaving + i) * *(vec *)(d->dt + i);
    }
    d->through = d->entering[Q - 1];
}

/* exp(a_i - a_j) for LANES tokens from i on, 0 where i < j */
INLINE vec decay(const decays *d, int64_t i, int64_t j) {
    static const int32_t lanes[] ALIGNED = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const ivec before = *(const ivec *)lanes < (int32_t)(j - i);
    vec e = exp2_vec((*(vec *)(d->high + i) - d->high[j]) + (*(vec *)(d->low + i) - d->low[j]));
    return (vec)(~before & (ivec)e);
}

static void mix(const unit *w, const decays *d, int64_t tokens) {
    for (int64_t j = 0; j < tokens; j++) {
        for (int64_t i = j / SIDE * SIDE; i < Q; i += LANES) /* and zeros where i < j */
            *(vec *)number(w->mixing, j, i) = decay(d, i, j) * d->dt[j] * *(vec *)number(w->scores, j, i);
        *number(w->mixing, j, j) += d->D;
    }
}

static void weigh(matrix to, matrix from, const float *scale, int64_t columns) {
    for (int64_t panel = 0; panel < columns / WIDE; panel++)
        for (int64_t i = 0; i < Q; i++)
            for (int c = 0; c < COLS; c++) at(to, i, panel)[c] = at(from, i, panel)[c] * scale[i];
}

/* of the unit's head h in a tensor (b, h, p, n), if there is one */
static float *remote(const scan *s, const unit *w, const float *tensor, int64_t h) {
    return tensor ? (float *)tensor + (w->b * s->heads + w->first + h) * s->width * s->size : 0;
}

/* in s->kept: (b, chunks / KEEP, h, n, p) */
static float *kept(const scan *s, const unit *w, int64_t chunk, int64_t h) {
    return s->kept + ((w->b * ((w->chunks + KEEP - 1) / KEEP) + chunk / KEEP) * s->heads + w->first + h) * w->n * w->p;
}

static matrix state_of(const unit *w, float *states, int64_t k, int64_t head) {
    return (matrix){states + (k * w->heads + head) * w->n * w->p, w->n};
}

static void forward_unit(const scan *s, unit *w) {
    const int64_t n = s->size, p = s->width;
    for (int64_t h = 0; h < w->heads; h++)
        load_state(state_of(w, w->states, 0, h), remote(s, w, s->initial, h), p, n, w->p);
    for (int64_t chunk = 0; chunk < w->chunks; chunk++) {
        int64_t t = chunk * Q, tokens = min_i64(Q, s->length - t);
        load_group(s, w, t, tokens);
        for (int64_t h = 0; h < w->heads; h++) {
            matrix state = state_of(w, w->states, 0, h);
            decays d;
            if (s->kept && chunk % KEEP == 0) memcpy(kept(s, w, chunk, h), state.at, w->n * w->p * sizeof(float));
            load(w->x, &s->x, w->b, t, w->first + h, tokens, p);
            load_decays(&d, s, w, w->first + h, t, tokens);
            mix(w, &d, tokens);
            tokens_out(w->out, d.entering, w->CT, state, n, w->mixing, w->x, w->p, tokens, 0);
            store(w->out, &s->y, w->b, t, w->first + h, tokens, p);
            weigh(w->weighted, w->x, d.weight, w->p);
            update(state, d.through, w->B, w->weighted, w->p, tokens);
        }
    }
    for (int64_t h = 0; h < w->heads; h++)
        store_state(state_of(w, w->states, 0, h), remote(s, w, s->final, h), p, n);
}

/* Within the chunk: of the mixing matrix's gradient x_j . dy_i, what reaches the scores, dt, D and the decays' logarithms. These
   are differences of large sums, so they are summed in float64: there the diagonal, whose decay is 1 whatever a is, cancels. */
static void reverse_mixing(const unit *w, const decays *d, int64_t tokens, wide *da, double *ddt, double *dD) {
    for (int64_t j = 0; j < tokens; j++) {
        wide later = {0};
        for (int64_t i = j / SIDE * SIDE; i < Q; i += LANES) {
            vec g = *(vec *)number(w->dmixing, j, i), e = decay(d, i, j), m = e * *(vec *)number(w->scores, j, i);
            vec by_log = g * m;
            *(vec *)number(w->dscores, j, i) += g * (e * d->dt[j]);
            *(vec *)number(w->mixing, j, i) = m * d->dt[j];
            for (int k = 0; k < 2; k++) {
                wide part = widened(by_log, k);
                later += part;
                da[2 * (i / LANES) + k] += part * (double)d->dt[j];
            }
        }
        double sum = wide_sum(later);
        ((double *)da)[j] -= sum * d->dt[j];
        ddt[j] += sum;
        *dD += *number(w->dmixing, j, j);
        *number(w->mixing, j, j) += d->D;
    }
}

static double dot(matrix a, matrix b, int64_t columns) {
    vec sum[DOT] = {{0}};
    for (int64_t i = 0; i < a.rows * columns / LANES; i += DOT)
        for (int k = 0; k < DOT; k++) sum[k] += ((vec *)a.at)[i + k] * ((vec *)b.at)[i + k];
    double all = 0;
    for (int k = 0; k < DOT; k++) all += lane_sum(sum[k]);
    return all;
}

static void reverse_head(const scan *s, const unit *w, int64_t t, int64_t tokens, int64_t h, matrix state, matrix dstate) {
    const int64_t n = s->size, p = s->width, head = w->first + h;
    decays d;
    double da[Q] ALIGNED = {0}, ddt[Q] = {0}, dlog = 0, dA = 0, dD = 0;
    float by_state[Q] ALIGNED, by_input[Q] ALIGNED;
    load(w->x, &s->x, w->b, t, head, tokens, p);
    load(w->dy, &s->dy, w->b, t, head, tokens, p);
    transpose(w->xT, w->x, Q, p);
    transpose(w->dyT, w->dy, Q, p);
    load_decays(&d, s, w, head, t, tokens);
    triangle(w->dmixing, w->xT, w->dyT, p, tokens);
    reverse_mixing(w, &d, tokens, (wide *)da, ddt, &dD);
    gather(w->dCT, by_state, d.entering, w->CT, state, w->dyT, p);
    gather(w->dBT, by_input, d.weight, w->BT, dstate, w->xT, p);
    tokens_out(w->out, d.weight, w->BT, dstate, n, w->mixing, w->dy, w->p, tokens, 1);
    store(w->out, &s->dx, w->b, t, head, tokens, p);
    da[tokens - 1] += d.through * dot(state, dstate, w->p);
    for (int64_t i = 0; i < tokens; i++) {
        double leaving = (double)by_input[i] * d.leaving[i];
        ddt[i] += leaving;
        da[i] += (double)by_state[i] * d.entering[i] - leaving * d.dt[i];
        da[tokens - 1] += leaving * d.dt[i];
    }
    float *to = s->ddt.data + w->b * s->ddt.batch + t * s->ddt.time + head * s->ddt.head;
    for (int64_t i = tokens - 1; i >= 0; i--) {
        dlog += da[i];
        dA += dlog * d.dt[i];
        to[i * s->ddt.time] = ddt[i] + dlog * d.A;
    }
    s->dA[w->b * s->heads + head] += dA, s->dD[w->b * s->heads + head] += dD;
    weigh(w->weighted, w->dy, d.entering, w->p);
    update(dstate, d.through, w->C, w->weighted, w->p, tokens);
}

static void sum_parts(const view *to, const view *from, const scan *s, const unit *w) {
    for (int64_t t = 0; t < s->length; t++) {
        float *sum = to->data + w->b * to->batch + t * to->time + w->group * to->head;
        const float *one = from->data + w->b * from->batch + t * from->time + w->group * from->head;
        for (int64_t j = 0; j < s->size; j++) {
            float all = one[j];
            for (int64_t i = 1; i < s->parts; i++) all += one[i * s->batch * from->batch + j];
            sum[j] = all;
        }
    }
}

static void backward_unit(const scan *s, unit *w) {
    const int64_t n = s->size, p = s->width, floats = w->n * w->p;
    for (int64_t h = 0; h < w->heads; h++)
        load_state(state_of(w, w->dstates, 0, h), remote(s, w, s->dfinal, h), p, n, w->p);
    for (int64_t segment = (w->chunks + KEEP - 1) / KEEP - 1; segment >= 0; segment--) {
        int64_t start = segment * KEEP, chunks = min_i64(KEEP, w->chunks - start);
        memcpy(w->states, kept(s, w, start, 0), w->heads * floats * sizeof(float));
        for (int64_t k = 0; k + 1 < chunks; k++) { /* the states that enter the other chunks, again */
            load(w->B, &s->B, w->b, (start + k) * Q, w->group, Q, n);
            for (int64_t h = 0; h < w->heads; h++) {
                decays d;
                matrix next = state_of(w, w->states, k + 1, h);
                load(w->x, &s->x, w->b, (start + k) * Q, w->first + h, Q, p);
                load_decays(&d, s, w, w->first + h, (start + k) * Q, Q);
                weigh(w->weighted, w->x, d.weight, w->p);
                memcpy(next.at, state_of(w, w->states, k, h).at, floats * sizeof(float));
                update(next, d.through, w->B, w->weighted, w->p, Q);
            }
        }
        for (int64_t k = chunks - 1; k >= 0; k--) {
            int64_t t = (start + k) * Q, tokens = min_i64(Q, s->length - t);
            load_group(s, w, t, tokens);
            memset(w->dscores.at, 0, Q * Q * sizeof(float));
            memset(w->dBT.at, 0, Q * w->n * sizeof(float));
            memset(w->dCT.at, 0, Q * w->n * sizeof(float));
            for (int64_t h = 0; h < w->heads; h++)
                reverse_head(s, w, t, tokens, h, state_of(w, w->states, k, h), state_of(w, w->dstates, 0, h));
            update(w->dCT, 1, w->B, w->dscores, Q, tokens);
            transpose(w->mixing, w->dscores, Q, Q);
            update(w->dBT, 1, w->C, w->mixing, Q, tokens);
            transpose(w->B, w->dBT, w->n, Q);
            transpose(w->C, w->dCT, w->n, Q);
            store(w->B, &s->dBs, w->part * s->batch + w->b, t, w->group, tokens, n);
            store(w->C, &s->dCs, w->part * s->batch + w->b, t, w->group, tokens, n);
        }
    }
    for (int64_t h = 0; h < w->heads; h++)
        store_state(state_of(w, w->dstates, 0, h), remote(s, w, s->dinitial, h), p, n);
    if (__atomic_add_fetch(&s->done[w->b * s->groups + w->group], 1, __ATOMIC_ACQ_REL) < s->parts) return;
    sum_parts(&s->dB, &s->dBs, s, w); /* by the worker that ends last, but in the order of the parts */
    sum_parts(&s->dC, &s->dCs, s, w);
}

/* ---- one token ---- */

/* s = keep s + u B, where s is a row of the state; returns s . C */
INLINE float step_row(float *s, float keep, float u, const float *B, const float *C, int64_t n) {
    vec sum[2] = {{0}};
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES)
        for (int k = 0; k < 2; k++) {
            unaligned_vec *at = (unaligned_vec *)(s + j) + k;
            vec new = keep * *at + u * ((const unaligned_vec *)(B + j))[k];
            *at = new;
            sum[k] += new * ((const unaligned_vec *)(C + j))[k];
        }
    sum[0] += sum[1];
    float rest = 0;
    for (; j < n; j++) {
        s[j] = keep * s[j] + u * B[j];
        rest += s[j] * C[j];
    }
    return sum_of(sum) + rest;
}

/* `length` is 1, and the state, `final`, is changed in place. */
static void step_head(const scan *s, int64_t b, int64_t h) {
    const int64_t n = s->size, p = s->width, group = h / (s->heads / s->groups);
    const float *x = s->x.data + b * s->x.batch + h * s->x.head, D = s->D ? s->D[h] : 0;
    const float *B = s->B.data + b * s->B.batch + group * s->B.head, *C = s->C.data + b * s->C.batch + group * s->C.head;
    const float dt = s->dt.data[b * s->dt.batch + h * s->dt.head], keep = exp2_vec(all(s->A[h] * dt * (float)LOG2E))[0];
    float *y = s->y.data + b * s->y.batch + h * s->y.head, *state = s->final + (b * s->heads + h) * p * n;
    for (int64_t i = 0; i < p; i++) y[i] = step_row(state + i * n, keep, dt * x[i], B, C, n) + D * x[i];
}

/* ---- workers ---- */

/* of the states that enter every KEEP-th chunk: (b, chunks / KEEP, h, padded state) */
int64_t kept_floats(const scan *s) {
    int64_t chunks = (s->length + Q * KEEP - 1) / (Q * KEEP);
    return s->batch * chunks * s->heads * round_up(s->size, FOURS) * round_up(s->width, WIDE);
}

static float *part(unit *w, int64_t floats) {
    int64_t start = w->used;
    w->used += round_up(floats, 16);
    return w->space ? w->space + start : 0;
}

static matrix make(unit *w, int64_t rows, int64_t columns) {
    return (matrix){part(w, rows * round_up(columns, WIDE)), rows};
}

static void carve_workspace(const scan *s, unit *w, int backward) {
    const int64_t heads = (s->heads / s->groups + s->parts - 1) / s->parts;
    w->n = round_up(s->size, FOURS), w->p = round_up(s->width, WIDE), w->chunks = (s->length + Q - 1) / Q;
    w->B = make(w, Q, w->n), w->C = make(w, Q, w->n), w->BT = make(w, w->n, Q), w->CT = make(w, w->n, Q);
    w->scores = make(w, Q, Q), w->mixing = make(w, Q, Q);
    w->x = make(w, Q, w->p), w->weighted = make(w, Q, w->p), w->out = make(w, Q, w->p);
    w->states = part(w, (backward ? KEEP : 1) * heads * w->n * w->p);
    if (!backward) return;
    w->dy = make(w, Q, w->p), w->xT = make(w, w->p, Q), w->dyT = make(w, w->p, Q);
    w->dmixing = make(w, Q, Q), w->dscores = make(w, Q, Q), w->dBT = make(w, w->n, Q), w->dCT = make(w, w->n, Q);
    w->dstates = part(w, heads * w->n * w->p);
}

/* Takes units until none is left. */
static void work(scan *s, int backward) {
    unit w = {0};
    void *space = 0;
    carve_workspace(s, &w, backward); /* without space: how much it takes */
    size_t bytes = w.used * sizeof(float);
    if (posix_memalign(&space, 64, bytes)) {
        s->failed = 1;
        return;
    }
    memset(space, 0, bytes);
    w.space = space, w.used = 0;
    carve_workspace(s, &w, backward);
    status before = flush();
    while (take(s, &w)) (backward ? backward_unit : forward_unit)(s, &w);
    restore(before);
    free(space);
}

void scan_forward(scan *s) { work(s, 0); }
void scan_backward(scan *s) { work(s, 1); }

void scan_step(scan *s) {
    status before = flush();
    for (int64_t i; (i = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED)) < s->batch * s->heads;)
        step_head(s, i / s->heads, i % s->heads);
    restore(before);
}
