"""An optimizer that does not bring torch's compiler along, which takes as long to load as torch.

torch's own bring it. To whoever waits for the end of a step it is an optimizer like any other.
"""

from lean import torch

Optimizer = torch.optim.Optimizer


class Descent(Optimizer):
    """Gradient descent with momentum."""

    add_param_group = Optimizer.add_param_group.__wrapped__

    def __init__(self, parameters, lr=0.01, momentum=0.9):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    def zero_grad(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(group["momentum"]).add_(parameter.grad)
                parameter.add_(velocity, alpha=-group["lr"])
