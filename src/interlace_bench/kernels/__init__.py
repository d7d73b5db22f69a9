"""`interlace bench kernels`: losses, optimizers and layers against torch and what else there is.

    report = work(KernelSettings(only="adam"), ranks, tell)

A case (case.py) is one op at one size, computed in several ways: ours, torch's, torch.compile's and
those of packages that happen to be installed. losses.py, adam.py, muon.py, grouped.py and float8.py
have the cases, host.py the time of the host.
"""
