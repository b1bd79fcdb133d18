"""Reports as one self-contained page each: no network, no framework, light and dark."""

from kvrelay.loadtest.html_report.page import compare_page, page

__all__ = ["compare_page", "page"]
