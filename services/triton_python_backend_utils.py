"""The name under which Triton's Python models import their API; see `conch.backends.python.utils`."""

from conch.backends.python.utils import *  # noqa: F403
from conch.backends.python.utils import __all__  # noqa: F401
