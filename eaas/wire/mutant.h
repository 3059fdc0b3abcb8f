/* Faults that a test builds in, one at a time, to see that the tests notice it (tests/integration/test_mutants.py). */
#ifndef EAAS_WIRE_MUTANT_H
#define EAAS_WIRE_MUTANT_H

/* 0 in what is installed. */
#define EAAS_MUTANT 0
#define MUTANT(number) (EAAS_MUTANT == (number))

#endif
