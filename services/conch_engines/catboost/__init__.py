"""The backend `catboost`: CatBoost's own files, with columns of categories and texts."""
