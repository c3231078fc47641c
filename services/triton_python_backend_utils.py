"""The name under which Triton's Python models import their API; see `conch.backends.python.api.pb_utils`."""

from conch.backends.python.api.pb_utils import *  # noqa: F403
from conch.backends.python.api.pb_utils import __all__  # noqa: F401
