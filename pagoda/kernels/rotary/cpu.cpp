// The rotary embedding; its definition is rotary/reference.py.
#include "rotate.h"

PAGODA_EXPORT void pagoda_rotary(const RotaryArgs* a, int32_t threads) {
    Angles angles(a->positions, a->cos, a->sin);
    rotate_rows(a->q, angles, a->rotated_q, threads);
    rotate_rows(a->k, angles, a->rotated_k, threads);
}
