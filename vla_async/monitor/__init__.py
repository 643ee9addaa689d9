"""Metrics, plots and reports."""
