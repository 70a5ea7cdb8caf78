"""The server that the tests of a module share."""

from tests.support.tiny_model import running as running
from tests.support.tiny_model import server as server
from tests.support.tiny_model import tiny as tiny
