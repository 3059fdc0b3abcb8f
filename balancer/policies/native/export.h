/* The functions that balancer/policies/compiled.py calls, and their results. It checks arrays' types and sizes, C what
 * is in them. */
#ifndef EAAS_POLICIES_EXPORT_H
#define EAAS_POLICIES_EXPORT_H

#define EXPORT __attribute__((visibility("default")))

enum { DONE = 0, NO_MEMORY = 1, TOO_MANY = 2, OUT_OF_RANGE = 3 };

#endif
