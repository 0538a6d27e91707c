/* The selective scan of Mamba-1 (arXiv 2312.00752, eq. 2 and Algorithm 2) and its gradient, in float32 on a CPU.

       S_t[c,n] = a_t S_{t-1}[c,n] + u_t[c] B_t[n],   a_t = exp(A[c,n] dt_t[c]),   u_t[c] = dt_t[c] x_t[c]
       y_t[c]   = sum_n C_t[n] S_t[c,n] + D[c] x_t[c]

   A vector holds LANES channels, so that any state size runs equally fast and the sum over n is no sum across lanes. Time goes
   in chunks of CHUNK tokens: what a chunk needs of a channel vector lies in the first-level cache, and the inner loop runs over
   its tokens for PAIR state components at a time, whose states stay in registers. A unit of work is GROUP vectors of channels of
   one sequence; workers take units from a shared counter. Every sum's order is fixed by the shapes alone, so the result is the
   same for any number of workers. */

#include "vectors.h"

#define CHUNK 128
#define GROUP (128 / LANES)
#define PAIR 2
#define LOG2E 1.44269504f

typedef struct { /* (batch, time, channel or state component), strides in elements */
    float *data;
    int64_t batch, time, last;
} view;

typedef struct { /* mirrored in selective_native.py. A, states and their gradients are contiguous; those marked ? may be NULL */
    int64_t batch, length, channels, size;
    view x, dt, B, C, y;
    const float *A, *D /*?*/, *initial /*?*/; /* (d, n), (d), (b, d, n) */
    float *final, *checkpoints /*?*/;         /* (b, d, n); (b, chunks, d, n): the states that enter the chunks */
    view dy, dx, ddt;
    const float *dfinal;                /* (b, d, n) */
    float *dA, *dD, *dB, *dC, *dinitial; /* (b, d, n), (b, d), (groups, b, t, n) twice, (b, d, n) */
    int64_t next, failed;               /* the counter; whether a worker had no memory */
} scan;

const int64_t chunk_tokens = CHUNK, group_channels = GROUP * LANES;

/* tokens x LANES channels of v into a tile; lanes from `width` on are 0 */
static void load_tile(vec *tile, const view *v, int64_t b, int64_t t0, int64_t tokens, int64_t c0, int64_t width) {
    const float *from = v->data + b * v->batch + t0 * v->time + c0 * v->last;
    float *to = (float *)tile;
    if (width < LANES) memset(tile, 0, tokens * sizeof(vec));
    if (v->last == 1) {
        for (int64_t t = 0; t < tokens; t++) memcpy(to + t * LANES, from + t * v->time, width * sizeof(float));
        return;
    }
    int64_t i = 0, row = v->last;
    for (; i + 4 <= width; i += 4)
        for (int64_t t = 0; t < tokens; t++) {
            const float *at = from + i * row + t * v->time;
            *(quad *)(to + t * LANES + i) = (quad){at[0], at[row], at[2 * row], at[3 * row]};
        }
    for (; i < width; i++)
        for (int64_t t = 0; t < tokens; t++) to[t * LANES + i] = from[t * v->time + i * row];
}

static void store_tile(const vec *tile, const view *v, int64_t b, int64_t t0, int64_t tokens, int64_t c0, int64_t width) {
    float *to = v->data + b * v->batch + t0 * v->time + c0 * v->last;
    const float *from = (const float *)tile;
    if (v->last == 1) {
        for (int64_t t = 0; t < tokens; t++) memcpy(to + t * v->time, from + t * LANES, width * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < width; i++) {
        int64_t t = 0;
        for (; v->time == 1 && t + 4 <= tokens; t += 4) {
            const float *at = from + t * LANES + i;
            quad row = {at[0], at[LANES], at[2 * LANES], at[3 * LANES]};
            memcpy(to + t + i * v->last, &row, sizeof row);
        }
        for (; t < tokens; t++) to[t * v->time + i * v->last] = from[t * LANES + i];
    }
}

/* (channels, n) in memory, times factor, to and from vectors; what `from` lacks, or all without one, is left as it is */
static void load_state(vec *state, const float *from, int64_t n, int64_t width, float factor) {
    for (int64_t i = 0; from && i < width; i++)
        for (int64_t j = 0; j < n; j++) state[j][i] = factor * from[i * n + j];
}

static void store_state(const vec *state, float *to, int64_t n, int64_t width) {
    for (int64_t i = 0; i < width; i++)
        for (int64_t j = 0; j < n; j++) to[i * n + j] = state[j][i];
}

/* B or C of a chunk as (n, CHUNK), contiguous */
static void load_rows(float *rows, const view *v, int64_t b, int64_t t0, int64_t tokens, int64_t n) {
    const float *from = v->data + b * v->batch + t0 * v->time;
    for (int64_t j = 0; j < n; j++)
        for (int64_t t = 0; t < tokens; t++) rows[j * CHUNK + t] = from[t * v->time + j * v->last];
}

/* y += C S over a chunk, for PAIR components of one channel vector; A is in units of ln 2 */
static inline void run_pair(vec *state, const vec *A, const float *B, const float *C, const vec *dt, const vec *u, vec *y,
                            int64_t tokens) {
    vec s[PAIR], a[PAIR];
    for (int k = 0; k < PAIR; k++) s[k] = state[k], a[k] = A[k];
    for (int64_t t = 0; t < tokens; t++) {
        vec sum = y[t];
        for (int k = 0; k < PAIR; k++) {
            s[k] = exp2_vec(a[k] * dt[t]) * s[k] + u[t] * B[k * CHUNK + t];
            sum += C[k * CHUNK + t] * s[k];
        }
        y[t] = sum;
    }
    for (int k = 0; k < PAIR; k++) state[k] = s[k];
}

/* The same, backwards. state: what enters the chunk; g: the gradient by the state that leaves it, replaced by the one by the
   state that enters it. With g_t = C_t dy_t + a_{t+1} g_{t+1} the gradient by S_t, and q_t = g_t a_t S_{t-1}, that by the
   exponent A dt:  dC_t = sum_c dy_t S_t,  dB_t = sum_c u_t g_t,  du_t = sum_n B_t g_t,  dA = sum_t dt_t q_t. */
static inline void reverse_pair(const vec *state, vec *g, const vec *A, const float *B, const float *C, const vec *dt,
                                const vec *u, const vec *dy, vec *du, vec *dexponent, vec *dA, vec *dB, vec *dC,
                                int64_t tokens) {
    vec decay[CHUNK][PAIR], decayed[CHUNK][PAIR], s[PAIR], a[PAIR], sum[PAIR];
    for (int k = 0; k < PAIR; k++) s[k] = state[k], a[k] = A[k];
    for (int64_t t = 0; t < tokens; t++)
        for (int k = 0; k < PAIR; k++) {
            decay[t][k] = exp2_vec(a[k] * dt[t]);
            decayed[t][k] = decay[t][k] * s[k];
            s[k] = decayed[t][k] + u[t] * B[k * CHUNK + t];
        }
    for (int k = 0; k < PAIR; k++) s[k] = g[k], sum[k] = dA[k];
    for (int64_t t = tokens - 1; t >= 0; t--) {
        vec by_u = du[t], by_exponent = dexponent[t];
        for (int k = 0; k < PAIR; k++) {
            s[k] += C[k * CHUNK + t] * dy[t];
            dC[k * CHUNK + t] += dy[t] * (decayed[t][k] + u[t] * B[k * CHUNK + t]);
            dB[k * CHUNK + t] += u[t] * s[k];
            by_u += B[k * CHUNK + t] * s[k];
            vec q = s[k] * decayed[t][k];
            by_exponent += a[k] * q;
            sum[k] += dt[t] * q;
            s[k] *= decay[t][k];
        }
        du[t] = by_u, dexponent[t] = by_exponent;
    }
    for (int k = 0; k < PAIR; k++) g[k] = s[k], dA[k] = sum[k];
}

/* A unit of work: `vectors` vectors of one sequence's channels, from `first` on; and the sizes that all units share. */
typedef struct {
    int64_t group, b, first, vectors, padded, chunks;
} unit;

static int take(scan *s, unit *w) {
    int64_t groups = (s->channels + group_channels - 1) / group_channels;
    int64_t i = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
    if (i >= s->batch * groups) return 0;
    w->group = i % groups, w->b = i / groups, w->first = w->group * group_channels;
    w->vectors = (min_i64(group_channels, s->channels - w->first) + LANES - 1) / LANES;
    w->padded = (s->size + PAIR - 1) / PAIR * PAIR;
    w->chunks = (s->length + CHUNK - 1) / CHUNK;
    return 1;
}

static void forward_unit(const scan *s, const unit *w, vec *space) {
    const int64_t n = s->size, m = w->padded;
    vec *A = space, *state = A + GROUP * m, dt[CHUNK], u[CHUNK], y[CHUNK];
    float *B = (float *)(state + GROUP * m), *C = B + m * CHUNK;
    memset(space, 0, (2 * GROUP * sizeof(vec) + 2 * CHUNK * sizeof(float)) * m);
    for (int64_t v = 0; v < w->vectors; v++) {
        int64_t c = w->first + v * LANES, width = min_i64(LANES, s->channels - c);
        load_state(A + v * m, s->A + c * n, n, width, LOG2E);
        load_state(state + v * m, s->initial ? s->initial + (w->b * s->channels + c) * n : 0, n, width, 1);
    }
    for (int64_t chunk = 0; chunk < w->chunks; chunk++) {
        int64_t t0 = chunk * CHUNK, tokens = min_i64(CHUNK, s->length - t0);
        load_rows(B, &s->B, w->b, t0, tokens, n);
        load_rows(C, &s->C, w->b, t0, tokens, n);
        for (int64_t v = 0; v < w->vectors; v++) {
            int64_t c = w->first + v * LANES, width = min_i64(LANES, s->channels - c);
            if (s->checkpoints)
                store_state(state + v * m, s->checkpoints + ((w->b * w->chunks + chunk) * s->channels + c) * n, n, width);
            vec skip = {0};
            for (int64_t i = 0; s->D && i < width; i++) skip[i] = s->D[c + i];
            load_tile(dt, &s->dt, w->b, t0, tokens, c, width);
            load_tile(u, &s->x, w->b, t0, tokens, c, width);
            for (int64_t t = 0; t < tokens; t++) y[t] = skip * u[t], u[t] *= dt[t];
            for (int64_t j = 0; j < m; j += PAIR)
                run_pair(state + v * m + j, A + v * m + j, B + j * CHUNK, C + j * CHUNK, dt, u, y, tokens);
            store_tile(y, &s->y, w->b, t0, tokens, c, width);
        }
    }
    for (int64_t v = 0; v < w->vectors; v++) {
        int64_t c = w->first + v * LANES;
        store_state(state + v * m, s->final + (w->b * s->channels + c) * n, n, min_i64(LANES, s->channels - c));
    }
}

static void backward_unit(const scan *s, const unit *w, vec *space) {
    const int64_t n = s->size, m = w->padded;
    vec *A = space, *g = A + GROUP * m, *dA = g + GROUP * m, *state = dA + GROUP * m, *dB = state + m, *dC = dB + m * CHUNK;
    vec x[CHUNK], dt[CHUNK], u[CHUNK], dy[CHUNK], du[CHUNK], dexponent[CHUNK], dD[GROUP];
    float *B = (float *)(dC + m * CHUNK), *C = B + m * CHUNK;
    memset(space, 0, ((3 * GROUP + 1 + 2 * CHUNK) * sizeof(vec) + 2 * CHUNK * sizeof(float)) * m);
    memset(dD, 0, sizeof dD);
    for (int64_t v = 0; v < w->vectors; v++) {
        int64_t c = w->first + v * LANES, width = min_i64(LANES, s->channels - c);
        load_state(A + v * m, s->A + c * n, n, width, LOG2E);
        load_state(g + v * m, s->dfinal + (w->b * s->channels + c) * n, n, width, 1);
    }
    for (int64_t chunk = w->chunks - 1; chunk >= 0; chunk--) {
        int64_t t0 = chunk * CHUNK, tokens = min_i64(CHUNK, s->length - t0);
        load_rows(B, &s->B, w->b, t0, tokens, n);
        load_rows(C, &s->C, w->b, t0, tokens, n);
        memset(dB, 0, 2 * m * CHUNK * sizeof(vec));
        for (int64_t v = 0; v < w->vectors; v++) {
            int64_t c = w->first + v * LANES, width = min_i64(LANES, s->channels - c);
            vec skip = {0};
            for (int64_t i = 0; s->D && i < width; i++) skip[i] = s->D[c + i];
            load_state(state, s->checkpoints + ((w->b * w->chunks + chunk) * s->channels + c) * n, n, width, 1);
            load_tile(x, &s->x, w->b, t0, tokens, c, width);
            load_tile(dt, &s->dt, w->b, t0, tokens, c, width);
            load_tile(dy, &s->dy, w->b, t0, tokens, c, width);
            for (int64_t t = 0; t < tokens; t++) {
                u[t] = dt[t] * x[t], dD[v] += dy[t] * x[t];
                du[t] = dexponent[t] = (vec){0};
            }
            for (int64_t j = 0; j < m; j += PAIR)
                reverse_pair(state + j, g + v * m + j, A + v * m + j, B + j * CHUNK, C + j * CHUNK, dt, u, dy, du, dexponent,
                             dA + v * m + j, dB + j * CHUNK, dC + j * CHUNK, tokens);
            for (int64_t t = 0; t < tokens; t++) {
                dexponent[t] = x[t] * du[t] + dexponent[t] * (1 / LOG2E);
                du[t] = dt[t] * du[t] + skip * dy[t];
            }
            store_tile(du, &s->dx, w->b, t0, tokens, c, width);
            store_tile(dexponent, &s->ddt, w->b, t0, tokens, c, width);
        }
        int64_t at = ((w->group * s->batch + w->b) * s->length + t0) * n;
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t j = 0; j < n; j++, at++)
                s->dB[at] = sum_of(dB + j * CHUNK + t), s->dC[at] = sum_of(dC + j * CHUNK + t);
    }
    for (int64_t v = 0; v < w->vectors; v++) {
        int64_t c = w->first + v * LANES, width = min_i64(LANES, s->channels - c), at = w->b * s->channels + c;
        store_state(dA + v * m, s->dA + at * n, n, width);
        store_state(g + v * m, s->dinitial + at * n, n, width);
        for (int64_t i = 0; i < width; i++) s->dD[at + i] = dD[v][i];
    }
}

/* Takes units until none is left. */
static void work(scan *s, void (*run)(const scan *, const unit *, vec *)) {
    unit w;
    size_t floats = (size_t)(3 * GROUP + 2 + 2 * CHUNK) * LANES + 2 * CHUNK;
    void *space = 0;
    if (posix_memalign(&space, sizeof(vec), floats * sizeof(float) * (s->size + PAIR))) {
        s->failed = 1;
        return;
    }
    status before = flush();
    while (take(s, &w)) run(s, &w, space);
    restore(before);
    free(space);
}

void scan_forward(scan *s) { work(s, forward_unit); }
void scan_backward(scan *s) { work(s, backward_unit); }

/* ---- one token ---- */

/* Of a channel: S = a S + u B in place, from its `n` states on; returns S . C */
static inline float step_channel(float *S, const float *A, float dt, float u, const float *B, const float *C, int64_t n) {
    vec sum = {0};
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES) {
        vec state = exp2_vec(get(A + j) * (dt * LOG2E)) * get(S + j) + u * get(B + j);
        put(S + j, state);
        sum += state * get(C + j);
    }
    if (j < n) { /* a call of memcpy costs more than all of the above */
        const size_t bytes = (n - j) * sizeof(float);
        vec a = {0}, state = {0}, b = {0}, c = {0};
        memcpy(&a, A + j, bytes), memcpy(&state, S + j, bytes), memcpy(&b, B + j, bytes), memcpy(&c, C + j, bytes);
        state = exp2_vec(a * (dt * LOG2E)) * state + u * b;
        memcpy(S + j, &state, bytes);
        sum += state * c;
    }
    return sum_of(&sum);
}

/* `length` is 1, B, C and the state, `final`, are contiguous, and the state is changed in place. */
void scan_step(scan *s) {
    const int64_t n = s->size, width = GROUP * LANES, groups = (s->channels + width - 1) / width;
    status before = flush();
    for (int64_t i; (i = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED)) < s->batch * groups;) {
        int64_t b = i / groups, first = i % groups * width, end = min_i64(first + width, s->channels);
        const float *B = s->B.data + b * s->B.batch, *C = s->C.data + b * s->C.batch;
        for (int64_t c = first; c < end; c++) {
            float x = s->x.data[b * s->x.batch + c * s->x.last], dt = s->dt.data[b * s->dt.batch + c * s->dt.last];
            float y = step_channel(s->final + (b * s->channels + c) * n, s->A + c * n, dt, dt * x, B, C, n);
            s->y.data[b * s->y.batch + c * s->y.last] = y + (s->D ? s->D[c] * x : 0);
        }
    }
    restore(before);
}
