"""Arrow tables: Parquet, Arrow and CSV files, and Arrow data of other libraries."""
