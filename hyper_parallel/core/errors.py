"""The errors that HyperParallel raises for what a user can put right."""


class HyperParallelError(Exception):
    """Base of every error that this library raises on purpose."""


class ConfigError(HyperParallelError):
    """A configuration or an argument is wrong: a key, a value, a combination."""


class BackendUnavailable(ConfigError, ImportError):
    """A framework is missing or unusable; the message says what to install."""


class PlanError(HyperParallelError):
    """A model can't be planned as asked; the message lists every violation."""


class LayoutError(HyperParallelError):
    """A mesh, a placement or a shape does not fit the others."""


class ContractError(HyperParallelError):
    """A tensor reached a boundary in another layout than the plan says."""


class GradientError(HyperParallelError):
    """A gradient is not finite, is missing on some ranks only, or does not fit its parameter."""


class CheckpointError(HyperParallelError):
    """Saved state is missing, damaged or does not fit the model."""


class CommunicationError(HyperParallelError):
    """Ranks could not be joined, or a collective failed."""
