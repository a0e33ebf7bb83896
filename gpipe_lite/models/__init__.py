"""The paper's two models, each an ``nn.Sequential`` that can be cut between any two layers.

==================  ======================================================  ===============
function            model                                                   layers
==================  ======================================================  ===============
:func:`amoebanetd`  AmoebaNet-D (L, D), classifies images                   L + 6
:func:`transformer` Transformer-L, predicts the next token                  L + 2
==================  ======================================================  ===============

Built under ``with torch.device("meta"):`` they take no memory, whatever their size.
"""

from gpipe_lite.models.amoebanet import amoebanetd
from gpipe_lite.models.transformer import transformer

__all__ = ["amoebanetd", "transformer"]
