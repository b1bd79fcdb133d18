"""Renders reports as self-contained HTML pages: no network, no framework, light and dark theme."""

from kvrelay.loadtest.html_report.page import compare_page, page, pareto_page

__all__ = ["compare_page", "page", "pareto_page"]
