#ifndef EAAS_DISPATCH_COMBINE_H
#define EAAS_DISPATCH_COMBINE_H

#include "../../eaas/minmax/arrays.h"

PyObject *dispatch_combine(PyObject *self, PyObject *args);

#endif
