"""Tables of Arrow: Parquet, Arrow and CSV files, and the data of other libraries."""
