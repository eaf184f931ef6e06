"""Modules that read Parquet, Arrow and CSV files, and Arrow data of other libraries."""
