/* What a mixer does to each token around its scan, in float32 on a CPU: the short convolution with its activation, and the root
   mean square norm with its gate. Both are bound by memory, so each reads and writes every number once.

   A unit of work is TOKENS tokens of one sequence. Threads take units from a shared counter. */

#include "vectors.h"

#define TOKENS 16
#define LOG2E 1.4426950408889634f

typedef struct { /* (batch, time, contiguous); strides in elements */
    float *data;
    int64_t batch, time, last;
} view;

typedef struct { /* mirrored in pointwise.py. Those marked ? may be NULL */
    int64_t batch, before, length, channels, taps, silu, group;
    view x, gate /*?*/, y;         /* x of the convolution has `before` tokens more than `length` */
    const float *weight, *bias /*?*/; /* of the convolution (taps, channels), the newest token's first; of the norm (channels) */
    double epsilon;
    int64_t next, failed; /* the counter; never set here */
} pointwise;

static inline vec get(const float *from, int64_t count) {
    vec v = {0};
    if (count >= LANES) v = *(const loose *)from;
    else memcpy(&v, from, count * sizeof(float));
    return v;
}

static inline void put(float *to, vec v, int64_t count) {
    if (count >= LANES) *(loose *)to = v;
    else memcpy(to, &v, count * sizeof(float));
}

/* v / (1 + exp(-v)), with the exponential of a number that is not positive */
static inline vec silu(vec v) {
    ivec sign = (ivec)v & INT32_MIN;
    vec e = exp2_vec((vec)((ivec)(v * LOG2E) | INT32_MIN));
    vec above = (vec)((sign >> 31 & (ivec)e) | (~(sign >> 31) & (ivec)all(1.0f)));
    return v * above / (1.0f + e);
}

static int take(pointwise *w, int64_t *b, int64_t *from, int64_t *to) {
    int64_t per_sequence = (w->length + TOKENS - 1) / TOKENS;
    int64_t i = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED);
    *b = i / per_sequence, *from = i % per_sequence * TOKENS, *to = smaller(*from + TOKENS, w->length);
    return *b < w->batch;
}

void convolve(pointwise *w) {
    int64_t b, from, to;
    unsigned mode = flush();
    while (take(w, &b, &from, &to))
        for (int64_t t = from; t < to; t++) {
            const float *x = w->x.data + b * w->x.batch + (t + w->before) * w->x.time;
            float *y = w->y.data + b * w->y.batch + t * w->y.time;
            int64_t taps = smaller(w->taps, t + w->before + 1); /* nothing lies before the first token */
            for (int64_t c = 0; c < w->channels; c += LANES) {
                int64_t count = w->channels - c;
                vec sum = w->bias ? get(w->bias + c, count) : all(0);
                for (int64_t i = 0; i < taps; i++)
                    sum += get(w->weight + i * w->channels + c, count) * get(x - i * w->x.time + c, count);
                put(y + c, w->silu ? silu(sum) : sum, count);
            }
        }
    restore(mode);
}

/* y = weight v / sqrt(mean(v^2) + epsilon) with v = x silu(gate), the mean over each `group` of channels */
void normalise(pointwise *w) {
    int64_t b, from, to;
    unsigned mode = flush();
    while (take(w, &b, &from, &to))
        for (int64_t t = from; t < to; t++) {
            const float *x = w->x.data + b * w->x.batch + t * w->x.time;
            const float *gate = w->gate.data ? w->gate.data + b * w->gate.batch + t * w->gate.time : 0;
            float *y = w->y.data + b * w->y.batch + t * w->y.time;
            for (int64_t start = 0; start < w->channels; start += w->group) {
                vec squares = {0};
                double sum = 0;
                for (int64_t c = start; c < start + w->group; c += LANES) {
                    int64_t count = start + w->group - c;
                    vec v = get(x + c, count);
                    if (gate) v *= silu(get(gate + c, count));
                    squares += v * v;
                    put(y + c, v, count);
                }
                for (int i = 0; i < LANES; i++) sum += squares[i];
                const vec scale = all((float)(1 / __builtin_sqrt(sum / w->group + w->epsilon)));
                for (int64_t c = start; c < start + w->group; c += LANES) {
                    int64_t count = start + w->group - c;
                    put(y + c, get(y + c, count) * scale * get(w->weight + c, count), count);
                }
            }
        }
    restore(mode);
}
