"""Muon and AdamW on one device in numpy, float64 throughout: the formulas of the papers, a matrix at a time."""

import numpy as np

from hyper_parallel.core.muon.matrices import usual_view
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.muon.scaling import scale_of

DEFAULTS = dict(
    lr=1e-3,
    weight_decay=0.1,
    momentum=0.95,
    nesterov=True,
    momentum_form="ema",
    coefficients="legacy",
    steps=5,
    eps=1e-7,
    scale="match_rms",
    second_moment=None,
)


def orthogonalized(matrix, schedule, eps):
    """Newton-Schulz of one matrix."""
    x = matrix / (np.linalg.norm(matrix) + eps)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for a, b, c in schedule:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon:
    """Whole parameters by name, their views, and the state; `step` takes whole gradients by name, or None."""

    def __init__(self, values, views=None, **options):
        self.options = DEFAULTS | options
        self.values = {name: value.astype(np.float64) for name, value in values.items()}
        self.views = {name: (views or {}).get(name) or usual_view(value.shape) for name, value in values.items()}
        self.momentum = {name: np.zeros_like(value) for name, value in self.values.items()}
        self.second = {}

    def step(self, gradients):
        said = self.options
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            update = self._update(name, self._momentum(name, gradient.astype(np.float64)))
            self.values[name] = self.values[name] * (1 - said["lr"] * said["weight_decay"]) - said["lr"] * update

    def _momentum(self, name, gradient):
        mu, ema = self.options["momentum"], self.options["momentum_form"] == "ema"
        share = 1 - mu if ema else 1.0
        self.momentum[name] = held = mu * self.momentum[name] + share * gradient
        return share * gradient + mu * held if self.options["nesterov"] else held

    def _update(self, name, whole):
        view, result = self.views[name], np.zeros_like(whole)
        planes, results = (each.reshape(view.planes, *view.plane) for each in (whole, result))
        schedule = NewtonSchulz(self.options["coefficients"], self.options["steps"]).schedule
        for plane in range(view.planes):
            for number, matrix in enumerate(view.matrices):
                rows = [row for each in matrix.rows for row in each]
                columns = [column for each in matrix.columns for column in each]
                found = orthogonalized(planes[plane][np.ix_(rows, columns)], schedule, self.options["eps"])
                if self.options["second_moment"] is not None:
                    found = self._rows_alike((name, plane, number), found, matrix.transposed)
                results[plane][np.ix_(rows, columns)] = found * scale_of(self.options["scale"], matrix.shape)
        return result

    def _rows_alike(self, key, found, transposed):
        """NorMuon: rows of the logical matrix, [out, in]."""
        rule = self.options["second_moment"]
        found = found.T if transposed else found
        mean = (found**2).mean(1)
        self.second[key] = held = rule.beta2 * self.second.get(key, 0.0) + (1 - rule.beta2) * mean
        scaled = found / (np.sqrt(held) + rule.eps)[:, None]
        scaled *= np.linalg.norm(found) / np.linalg.norm(scaled)
        return scaled.T if transposed else scaled
