#include "layer.h"

void
put_everywhere(Layer *layer, int32_t slot, int32_t expert)
{
    for (int32_t b = 0; b < layer->scenarios; b++) {
        flow_put(&layer->flow_B[b], slot, expert);
    }
}

void
take_everywhere(Layer *layer, int32_t slot)
{
    for (int32_t b = 0; b < layer->scenarios; b++) {
        flow_take(&layer->flow_B[b], slot);
    }
}

bool
holds(const Flow *flow, int32_t server, int32_t expert)
{
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        if (flow->expert_N[n] == expert) {
            return true;
        }
    }
    return false;
}

int32_t
free_slot(const Flow *flow, int32_t server)
{
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        if (flow->expert_N[n] == NONE) {
            return n;
        }
    }
    return NONE;
}

int32_t
replicas(const Flow *flow, int32_t expert)
{
    int32_t count = 0;
    for (int32_t n = flow->head_E[expert]; n != NONE; n = flow->next_N[n]) {
        count++;
    }
    return count;
}
