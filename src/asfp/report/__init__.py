"""See it: run records as one page, as pictures, in the terminal, or live while training runs."""

from asfp.report.content import Content, gather
from asfp.report.page import write_page

__all__ = ["Content", "gather", "write_page"]
