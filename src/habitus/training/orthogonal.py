"""The nearest orthogonal matrix, roughly and fast: what Muon does to an update.

Letters: n matrices of r rows and c columns, r ≤ c.
"""

import torch
from torch import Tensor

STEPS = 5
# An odd polynomial a·s + b·s³ + c·s⁵ that, applied five times, brings every singular value between about 0.003 and 1
# into 0.7…1.2 (Keller Jordan and others, "Muon", 2024): exact orthogonality buys nothing, speed at the start does.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-12


def orthogonalised(matrices: Tensor) -> Tensor:
    """[n, r, c] with the singular vectors it had and singular values near 1, in float32.

    Products run in bfloat16 on CUDA and in float32 elsewhere. A matrix of zeros stays zero.
    """
    a, b, c = COEFFICIENTS
    norm = torch.linalg.matrix_norm(matrices.float(), keepdim=True)
    x = (matrices / norm.clamp(min=_SMALLEST_NORM)).to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.float()
