"""Text sources beyond plain text: JSON, CSV and Parquet files, Hugging Face data sets, a separate validation
text."""
