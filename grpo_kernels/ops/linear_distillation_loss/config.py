"""Names of linear_distillation_loss, and their codes: the positions."""

from __future__ import annotations

KINDS = ("forward_kl", "reverse_kl", "jsd")
FORWARD_KL, REVERSE_KL, JSD = range(len(KINDS))
TAILS = ("bucket", "ignore", "renormalise")
BUCKET, IGNORE, RENORMALISE = range(len(TAILS))
ABSENT = -1  # an unused slot of teacher_ids
# The rest of a teacher's probability is known to the rounding of 1 in float32.
LEAST_REST = 2.0**-24
