/* KL(teacher || student) of logits, and its gradient in the student's, in float32 on a CPU.

   A unit of work is one token: its two rows of logits stay in the first-level cache while they are read again. Threads take units
   from a shared counter. */

#include "vectors.h"

#define LOG2E 1.4426950408889634f
#define BLOCK 256 /* words that are summed in float32 */
#define LN2 0.6931471805599453

typedef struct { /* mirrored in divergence.py. All is contiguous */
    int64_t tokens, words;
    const float *student, *teacher; /* (tokens, words) */
    float *gradient;                /* likewise: p_student - p_teacher */
    double *divergence;             /* (tokens) */
    int64_t next, failed;           /* the counter; never set here */
} divergence;

typedef struct { /* of a row of logits: log sum exp = most + log2_sum ln 2; most: the largest logit */
    float most;
    double log2_sum;
} scale;

/* LANES logits from the w-th on; -infinity, and so probability 0, beyond the last word */
static inline vec logits_at(const float *logits, int64_t w, int64_t words) {
    return get_or(logits + w, words - w, all(-__builtin_inff()));
}

/* from a logit's distance to the largest one of its row */
static inline vec probability(vec distance, double log2_sum) {
    return exp2_vec(distance * LOG2E - all((float)log2_sum));
}

static scale scale_of(const float *logits, int64_t words) {
    vec most = logits_at(logits, 0, words);
    for (int64_t w = LANES; w < words; w += LANES) {
        vec v = logits_at(logits, w, words);
        most = chosen(v > most, v, most);
    }
    scale s = {most[0], 0};
    double whole = 0;
    for (int i = 1; i < LANES; i++) s.most = most[i] > s.most ? most[i] : s.most;
    for (int64_t block = 0; block < words; block += BLOCK) {
        vec sum = {0};
        for (int64_t w = block; w < min_i64(block + BLOCK, words); w += LANES)
            sum += probability(logits_at(logits, w, words) - s.most, 0);
        whole += lane_sum(sum);
    }
    s.log2_sum = __builtin_log2(whole);
    return s;
}

/* of one token: sum_w p_teacher (log p_teacher - log p_student) */
static double diverge_token(const divergence *k, int64_t token) {
    const float *student = k->student + token * k->words, *teacher = k->teacher + token * k->words;
    float *gradient = k->gradient + token * k->words;
    const scale s = scale_of(student, k->words), t = scale_of(teacher, k->words);
    const vec offset = all((float)((t.log2_sum - s.log2_sum) * LN2));
    double whole = 0;
    for (int64_t block = 0; block < k->words; block += BLOCK) {
        vec sum = {0};
        for (int64_t w = block; w < min_i64(block + BLOCK, k->words); w += LANES) {
            const int64_t count = k->words - w;
            vec x = logits_at(student, w, k->words) - s.most, target = logits_at(teacher, w, k->words) - t.most;
            vec p = probability(target, t.log2_sum), term = p * (target - x - offset);
            for (int64_t i = count; i < LANES; i++) term[i] = 0; /* not infinity - infinity */
            sum += term;
            put(gradient + w, probability(x, s.log2_sum) - p, count);
        }
        whole += lane_sum(sum);
    }
    return whole;
}

void diverge(divergence *k) {
    status mode = flush();
    for (int64_t i; (i = __atomic_fetch_add(&k->next, 1, __ATOMIC_RELAXED)) < k->tokens;)
        k->divergence[i] = diverge_token(k, i);
    restore(mode);
}
