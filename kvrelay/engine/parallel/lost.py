"""Why an engine of several ranks can run no step any more. Free of torch."""


class RankLost(Exception):
    """A rank has died, or they no longer compute the same step: the worker has to end, and all its
    ranks with it.
    """
