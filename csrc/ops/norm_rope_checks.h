#pragma once
// Checks that ops which insert latents share.
#include "ops/norm_rope_insert.h"
#include "registration.h"

namespace mla_fp8 {

// Checks and returns all of NormRopeInsertParams but the heads.
NormRopeInsertParams check_latents(const Check& check, MLA_K_NORM_ROPE_INSERT_ARGUMENTS);

}  // namespace mla_fp8
