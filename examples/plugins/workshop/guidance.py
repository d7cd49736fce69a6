"""A guidance schedule: no guidance while noise rules, all of it afterwards."""

LOUDEST = 4.0
"""The noise level gamma = log(sigma^2/alpha^2) from which guidance acts; a flow of small width decides about there."""


def window(at):
    """The factor on a control's nominal strength at noise levels `at`, which have alpha, sigma and gamma."""
    return (at.gamma <= LOUDEST).to(at.sigma.dtype)
