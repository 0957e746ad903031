"""Max-MIL: for each class, the logit of a bag is the largest logit of its instances.

z_j = relu(E x_j),   l_j = W z_j + c,   F_c = max_j l_jc
"""

from torch import Tensor

from carmil.models.mean import MeanMIL
from carmil.models.pooling import Offsets, bag_max
from carmil.models.registry import register


class MaxMIL(MeanMIL):
    def pool(self, logits: Tensor, offsets: Offsets) -> Tensor:
        return bag_max(logits, offsets)


register("max", MaxMIL, "the largest of the instances' answers, class by class; no attention")
