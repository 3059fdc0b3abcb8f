/* The functions that balancer/policies/compiled.py calls, and their results. */
#ifndef EAAS_POLICIES_EXPORT_H
#define EAAS_POLICIES_EXPORT_H

#define EXPORT __attribute__((visibility("default")))

enum { DONE = 0, NO_MEMORY = 1, TOO_MANY = 2 };

#endif
