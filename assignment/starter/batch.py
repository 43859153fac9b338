"""Part 3: exact statistics of a batch that no process sees as a whole.

The batch B of an optimizer step is divided among ranks, and each rank's share into
micro-batches. toy.py has a small policy, a loss, and a process group whose collectives
all ranks have to call equally often, in the same order. Ranks may have different
numbers of micro-batches, and one may have none. toy.run_on_ranks tries a function out
on several ranks.
"""

from torch import Tensor
from toy import Group, MicroBatch


def batch_quantities(
    log_ratios: list[Tensor], masks: list[Tensor], rank: int, group: Group
) -> tuple[Tensor, int]:
    """e_B (11) and the number of tokens of the whole batch, on every rank.

    log_ratios and masks, [N_i, T_i] each, are the micro-batches of this rank; padding
    holds NaN. The tokens cannot be gathered, as a collective takes six numbers at most:
    e_B is a function of a few sums. It has to be right at log rho = 400, too.
    """
    raise NotImplementedError("part 3, e_B and the token count, is not written yet")


def gradient_of_rank(
    weight: Tensor, micro_batches: list[MicroBatch], rank: int, group: Group
) -> Tensor:
    """The gradient of this rank, [D, V]; the average over ranks is that of the batch.

    weight [D, V] has no gradient when it comes. The loss is toy.toy_loss with log
    pi_theta from toy.log_probabilities, and e_B and the token count of the whole batch.
    After this function the framework averages over the ranks, as FSDP and DDP do. A
    rank without a micro-batch has a gradient of zeros.
    """
    raise NotImplementedError("part 3, the gradient, is not written yet")
