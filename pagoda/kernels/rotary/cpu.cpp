// The rotary embedding; its definition is rotary/reference.py.
#include "rotate.h"

PAGODA_EXPORT void pagoda_rotary(const RotaryArgs* a, int32_t threads) {
    rotate_rows(a->q, a->positions, a->cos, a->sin, a->rotated_q, threads);
    rotate_rows(a->k, a->positions, a->cos, a->sin, a->rotated_k, threads);
}
