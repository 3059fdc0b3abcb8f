/* How long a client waits for a server's answer, from the usual time of such a request. Times are in seconds. */
#ifndef EAAS_DISPATCH_DEADLINES_H
#define EAAS_DISPATCH_DEADLINES_H

#include <stdint.h>

#include "../../eaas/wire/mutant.h"

/* Size classes of requests: the bit length of the number of tokens. */
#define SIZE_CLASSES 32
/* A short request gets six times its usual time; a long one varies less and gets twice. */
#define MARGIN 6.0
#define SHORT_S 0.2
#define LONG_MARGIN 2.0
/* An earlier hedge would react to scheduling noise, not to a slow server. */
#define LEAST_HEDGE_S 0.002

static inline int
size_class(uint32_t tokens)
{
    int bits = 0;
    for (; tokens > 0; tokens >>= 1) {
        bits++;
    }
    return bits < SIZE_CLASSES ? bits : SIZE_CLASSES - 1;
}

/* Time until the request is given up: at least `least_s`, at most `most_s`. */
static inline double
budget_s(double usual_s, double least_s, double most_s)
{
    double longest_s = LONG_MARGIN * usual_s > SHORT_S ? LONG_MARGIN * usual_s : SHORT_S;
    double patience_s = MARGIN * usual_s < longest_s ? MARGIN * usual_s : longest_s;
    patience_s = patience_s > least_s ? patience_s : least_s;
    return patience_s < most_s ? patience_s : most_s;
}

/* Time until the request is hedged; `tail` is the multiple of the usual time that few requests exceed. */
static inline double
hedge_s(double usual_s, double tail)
{
    double after_s = usual_s * tail;
    return after_s > LEAST_HEDGE_S && !MUTANT(21) ? after_s : LEAST_HEDGE_S;
}

#endif
