"""The error of an engine of several ranks that can run no more steps. Does not import torch."""


class RankLost(Exception):
    """A rank has died, or the ranks no longer compute the same step. The worker and all its ranks
    have to end.
    """
