"""Gives the states of a trace to other libraries: pandas, datasets, Parquet, numpy, xarray and speculators."""
