/* What a mixer does to each token around its scan, in float32 on a CPU: the short convolution with its activation, and the root
   mean square norm with its gate; and the gradients of both, which compute again what lies between input and output. All are
   bound by memory, so each reads and writes every number once.

   A unit of work is TOKENS tokens of one sequence. Threads take units from a shared counter. */

#include "vectors.h"

#define TOKENS 32
#define MOST_TAPS 16
#define LOG2E 1.4426950408889634f

typedef struct { /* (batch, time, contiguous); strides in elements */
    float *data;
    int64_t batch, time, last;
} view;

typedef struct { /* mirrored in conv_norm_native.py. Those marked ? may be NULL */
    double epsilon;
    int64_t batch, before, length, channels, taps, silu, group;
    view x, gate /*?*/, y;         /* x of the convolution has `before` tokens more than `length` */
    view dy, dx, dgate /*?*/;      /* gradients; dx is as long as x */
    const float *weight, *bias /*?*/; /* of the convolution (taps, channels), the newest token's first; of the norm (channels) */
    float *shares /*?*/; /* of every unit in the gradients of weight and bias: (units, taps + 1 or 1, channels) */
    int64_t next, failed; /* the counter; never set here */
} conv_norm;

/* f / (1 + exp(-v)); exp(-v) is infinite beyond all floats */
static inline vec times_sigmoid(vec f, vec v) {
    const vec most = all(128.0f);
    vec z = v * -LOG2E;
    return f / (1.0f + exp2_vec(chosen(z > most, most, z)));
}

static inline vec silu(vec v) { return times_sigmoid(v, v); }

/* the derivative of silu at v, from s = 1 / (1 + exp(-v)) */
static inline vec slope(vec v, vec s) { return s * (1.0f + v * (1.0f - s)); }

static int take(conv_norm *w, int64_t *unit, int64_t *b, int64_t *from, int64_t *to) {
    int64_t per_sequence = (w->length + TOKENS - 1) / TOKENS, i = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED);
    *unit = i, *b = i / per_sequence, *from = i % per_sequence * TOKENS, *to = min_i64(*from + TOKENS, w->length);
    return *b < w->batch;
}

static inline float *at(const view *v, int64_t b, int64_t t) { return v->data + b * v->batch + t * v->time; }

/* of the token whose input lies at x; inlined, for the number of taps to be a constant */
INLINE void convolve_token(const conv_norm *w, int64_t taps, const float *x, float *y) {
    for (int64_t c = 0; c < w->channels; c += LANES) {
        const int64_t count = w->channels - c;
        vec sum = w->bias ? get(w->bias + c, count) : all(0);
        for (int64_t i = 0; i < taps; i++)
            sum += get(w->weight + i * w->channels + c, count) * get(x - i * w->x.time + c, count);
        put(y + c, w->silu ? silu(sum) : sum, count);
    }
}

void convolve(conv_norm *w) {
    int64_t unit, b, from, to;
    status mode = flush();
    while (take(w, &unit, &b, &from, &to))
        for (int64_t t = from; t < to; t++) {
            const float *x = at(&w->x, b, t + w->before);
            const int64_t taps = min_i64(w->taps, t + w->before + 1); /* nothing lies before the first token */
            if (taps == 4) convolve_token(w, 4, x, at(&w->y, b, t));
            else convolve_token(w, taps, x, at(&w->y, b, t));
        }
    restore(mode);
}

/* Of LANES channels from c on. The gradient before the activation of token t reaches the inputs of t and the taps - 1 before it,
   so those of a unit's last inputs come from tokens of the next. Inlined, for `most`, the number of taps, to be a constant. */
INLINE void convolve_back(
    const conv_norm *w, int64_t most, int64_t b, int64_t from, int64_t to, int64_t c, float *shares) {
    const int64_t count = w->channels - c, last = min_i64(to + most - 1, w->length);
    vec inner[TOKENS + MOST_TAPS], weight[MOST_TAPS], dweight[MOST_TAPS] = {0}, dbias = {0};
    for (int64_t i = 0; i < most; i++) weight[i] = get(w->weight + i * w->channels + c, count);
    for (int64_t t = from; t < last; t++) {
        const float *x = at(&w->x, b, t + w->before) + c;
        const int64_t taps = min_i64(most, t + w->before + 1);
        vec d = get(at(&w->dy, b, t) + c, count);
        if (w->silu) {
            vec sum = w->bias ? get(w->bias + c, count) : all(0);
            for (int64_t i = 0; i < taps; i++) sum += weight[i] * get(x - i * w->x.time, count);
            d *= slope(sum, times_sigmoid(all(1.0f), sum));
        }
        inner[t - from] = d;
        if (shares && t < to) {
            dbias += d;
            for (int64_t i = 0; i < taps; i++) dweight[i] += d * get(x - i * w->x.time, count);
        }
    }
    /* the first unit has the context, too, of which no more than taps - 1 tokens were read */
    for (int64_t t = from ? from : -min_i64(w->before, most - 1); t < to; t++) {
        vec d = {0};
        for (int64_t i = t < from ? from - t : 0; i < most && t + i < last; i++) d += weight[i] * inner[t + i - from];
        put(at(&w->dx, b, t + w->before) + c, d, count);
    }
    if (!shares) return;
    for (int64_t i = 0; i < most; i++) put(shares + i * w->channels + c, dweight[i], count);
    put(shares + most * w->channels + c, dbias, count);
}

void convolve_backward(conv_norm *w) {
    int64_t unit, b, from, to;
    status mode = flush();
    while (take(w, &unit, &b, &from, &to)) {
        float *shares = w->shares ? w->shares + unit * (w->taps + 1) * w->channels : 0;
        for (int64_t c = 0; c < w->channels; c += LANES)
            if (w->taps == 4) convolve_back(w, 4, b, from, to, c, shares);
            else convolve_back(w, w->taps, b, from, to, c, shares);
    }
    restore(mode);
}

/* y = weight v / sqrt(mean(v^2) + epsilon) with v = x silu(gate), the mean over each `group` of channels */
void normalise(conv_norm *w) {
    int64_t unit, b, from, to;
    status mode = flush();
    while (take(w, &unit, &b, &from, &to))
        for (int64_t t = from; t < to; t++) {
            const float *x = at(&w->x, b, t), *gate = w->gate.data ? at(&w->gate, b, t) : 0;
            float *y = at(&w->y, b, t);
            for (int64_t start = 0; start < w->channels; start += w->group) {
                vec squares = {0};
                for (int64_t c = start; c < start + w->group; c += LANES) {
                    int64_t count = start + w->group - c;
                    vec v = get(x + c, count);
                    if (gate) v *= silu(get(gate + c, count));
                    squares += v * v;
                    put(y + c, v, count);
                }
                const vec scale = all((float)(1 / __builtin_sqrt(lane_sum(squares) / w->group + w->epsilon)));
                for (int64_t c = start; c < start + w->group; c += LANES) {
                    int64_t count = start + w->group - c;
                    put(y + c, get(y + c, count) * scale * get(w->weight + c, count), count);
                }
            }
        }
    restore(mode);
}

/* With r = 1 / sqrt(mean(v^2) + epsilon) and a = weight dy:  dv = r a - r^3 mean(a v) v,  dweight = sum dy r v */
void normalise_backward(conv_norm *w) {
    int64_t unit, b, from, to;
    status mode = flush();
    while (take(w, &unit, &b, &from, &to)) {
        float *shares = w->shares ? w->shares + unit * w->channels : 0;
        if (shares) memset(shares, 0, w->channels * sizeof(float));
        for (int64_t t = from; t < to; t++) {
            const float *x = at(&w->x, b, t), *gate = w->gate.data ? at(&w->gate, b, t) : 0, *dy = at(&w->dy, b, t);
            float *dx = at(&w->dx, b, t), *dgate = gate ? at(&w->dgate, b, t) : 0;
            for (int64_t start = 0; start < w->channels; start += w->group) {
                const int64_t end = start + w->group;
                vec squares = {0}, products = {0};
                for (int64_t c = start; c < end; c += LANES) { /* v and the gate's sigmoid wait where their gradients will stand */
                    const int64_t count = end - c;
                    vec v = get(x + c, count);
                    if (gate) {
                        vec g = get(gate + c, count), s = times_sigmoid(all(1.0f), g);
                        v *= g * s;
                        put(dgate + c, s, count);
                    }
                    squares += v * v;
                    products += v * get(w->weight + c, count) * get(dy + c, count);
                    put(dx + c, v, count);
                }
                const double root = 1 / __builtin_sqrt(lane_sum(squares) / w->group + w->epsilon);
                const vec scale = all((float)root), back = all((float)(root * root * root * lane_sum(products) / w->group));
                for (int64_t c = start; c < end; c += LANES) {
                    const int64_t count = end - c;
                    vec v = get(dx + c, count), d = get(dy + c, count);
                    vec dv = scale * get(w->weight + c, count) * d - back * v;
                    if (gate) {
                        vec g = get(gate + c, count), s = get(dgate + c, count);
                        put(dx + c, dv * g * s, count);
                        put(dgate + c, dv * get(x + c, count) * slope(g, s), count);
                    } else put(dx + c, dv, count);
                    if (shares) put(shares + c, get(shares + c, count) + d * scale * v, count);
                }
            }
        }
    }
    restore(mode);
}
