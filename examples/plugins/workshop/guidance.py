"""A guidance schedule: no guidance while noise rules, all of it afterwards."""


def window(at):
    """The factor on a control's nominal strength at noise levels `at`, which have alpha, sigma and gamma."""
    return (at.alpha >= at.sigma).to(at.sigma.dtype)
