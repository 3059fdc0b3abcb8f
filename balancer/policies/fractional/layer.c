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

void
put_all(Layer *layer, const int32_t *expert_N)
{
    for (int32_t b = 0; b < layer->scenarios; b++) {
        Flow *flow = &layer->flow_B[b];
        for (int32_t e = 0; e < layer->experts; e++) {
            flow->head_E[e] = NONE;
        }
        for (int32_t n = 0; n < flow->slots; n++) {
            flow->expert_N[n] = NONE;
            if (expert_N[n] != NONE) {
                flow_put(flow, n, expert_N[n]);
            }
        }
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

bool
is_near(const Layer *layer, int32_t server, int32_t expert)
{
    const Flow *flow = &layer->flow_B[0];
    if (layer->node_S == NULL || flow->head_E[expert] == NONE) {
        return true;
    }
    for (int32_t n = flow->head_E[expert]; n != NONE; n = flow->next_N[n]) {
        if (layer->node_S[flow->server_N[n]] == layer->node_S[server]) {
            return true;
        }
    }
    return false;
}

int64_t
count_cross_node(const Layer *layer, int32_t expert)
{
    const Flow *flow = &layer->flow_B[0];
    int64_t nodes = 0;
    for (int32_t n = flow->head_E[expert]; layer->node_S != NULL && n != NONE; n = flow->next_N[n]) {
        bool first = true;
        for (int32_t m = flow->head_E[expert]; m != n; m = flow->next_N[m]) {
            first = first && layer->node_S[flow->server_N[m]] != layer->node_S[flow->server_N[n]];
        }
        nodes += first;
    }
    return nodes > 0 ? nodes - 1 : 0;
}

void
make_shares(Flow *flow)
{
    for (int32_t e = 0; e < flow->experts; e++) {
        double sum = 0, even = 1.0 / replicas(flow, e);
        for (int32_t n = flow->head_E[e]; n != NONE; n = flow->next_N[n]) {
            sum += flow->flow_N[n];
        }
        for (int32_t n = flow->head_E[e]; n != NONE; n = flow->next_N[n]) {
            flow->flow_N[n] = sum > 0 ? flow->flow_N[n] / sum : even;
        }
    }
}
